"""A crafted record is refused before anything runs."""

import subprocess  # noqa: F401 (crafted records name it through this module)
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hierfl import CannotRemake
from hierfl.program.recipes import remake
from hierfl.program.sites import recorded


def touch(path: str) -> None:
    """A user's own function that a crafted record may name but must not call."""
    Path(path).touch()


RUN = {"command": "touch ran", "args": ["touch", "ran"], "path": "ran", "src": "a", "dst": "ran"}
CLOSED = """
    os:system posix:system subprocess:Popen builtins:eval importlib:import_module os.system
    subprocess.Popen hierfl.runs.checkpoint:shutil.copyfile hierfl.runs.checkpoint:save
    hierfl.models:torch.os.system hierfl.models.likelihood:torch
    hierfl.models.likelihood:Likelihood.__call__ hierfl.models.likelihood
    hierfl.methods.fedavg.__globals__ hierfl.methods.fedavg:fedavg.__globals__
    hierfl.methods.fedavg:SGD.__init__ hierfl.methods.__dict__ hierfl.program.public_names.find
    hierfl.optimizers.torch hierfl.guides.structured.build torch:load torch.load torch.hub:load
    torch.serialization:load torch.optim.lr_scheduler
    torch.optim.swap_in_optimizer_params_and_state numpy:load pyro:clear_param_store
    pyro.distributions.enable_validation pyro.distributions.kl
"""
NAMES = [
    *CLOSED.split(),
    *(f"{__name__}:{name}" for name in ("Path", "subprocess.Popen", "sys.exit", "nothing")),
    *("", ":", ".", "__main__:"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["named", "made_by", "family"])
def test_a_name_that_is_not_public_is_refused(
    form: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [{}] if form == "named" else [{"with": {k: v}} for k, v in RUN.items()]
    for extra in options:
        with pytest.raises(
            CannotRemake,
            match=r"pass (the method|it): load\(\.\.\., (method|model)=\.\.\.\)$",
        ):
            remake({"made_by": "hierfl.methods.fedsvi", "with": {"model": {form: name, **extra}}})
    assert not list(tmp_path.iterdir())


CRAFTED: dict[str, Any] = {
    "no key": {},
    "an unknown key": {"pickle": "gASVBAAAAAAAAABLAS4="},
    "one key too many": {"named": "hierfl.models.regression", "with": {}},
    "no options": {"made_by": "hierfl.models.regression"},
    "two kinds": {
        "made_by": "hierfl.models.regression",
        "family": "hierfl.guides.delta",
        "with": {},
    },
    "a bare list": ["hierfl.models.regression"],
    "a name that is a number": {"named": 3},
    "a name that is a list": {"made_by": ["os", "system"], "with": {}},
    "options that are a list": {"made_by": "hierfl.models.regression", "with": ["x"]},
    "an option that is unknown": {"made_by": "hierfl.models.regression", "with": {"nothing": 1}},
    "an option of a wrong type": {"made_by": "hierfl.models.regression", "with": {"varying": 1}},
    "an option of a family": {"family": "hierfl.guides.low_rank", "with": {"nothing": 1}},
    "a parameter too few": {"made_by": "pyro.distributions.Normal", "with": {"loc": 0.0}},
    "a scale < 0": {"made_by": "pyro.distributions.Normal", "with": {"loc": 0.0, "scale": -1.0}},
    "a function as a factory": {"made_by": f"{__name__}:touch", "with": {"path": "ran"}},
    "a function as a family": {"family": f"{__name__}:touch", "with": {"path": "ran"}},
    "a family as a factory": {"made_by": "hierfl.guides.delta", "with": {}},
    "a factory as a family": {"family": "hierfl.models.regression", "with": {}},
    "a guide's posterior as a factory": {"made_by": "hierfl.guides.full_normal", "with": {}},
    "an optimizer of torch as a factory": {"made_by": "torch.optim.SGD", "with": {"params": None}},
    "no dtype": {"tensor": [1.0], "dtype": "load"},
    "a dtype of words": {"tensor": [1.0], "dtype": "nn.Linear"},
    "a dtype that is a number": {"tensor": [1.0], "dtype": 3},
    "a tensor of words": {"tensor": ["a"], "dtype": "float64"},
    "a ragged tensor": {"tensor": [[1.0], [1.0, 2.0]], "dtype": "float64"},
    "a tensor of nothing": {"tensor": None, "dtype": "float64"},
    "a mapping that is a list": {"mapping": [1, 2]},
    "a sequence that is a mapping": {"sequence": {"a": 1}},
    "an opaque thing": {"opaque": "os.system"},
    "a long one": {"pickle": "a" * 10_000},
}


@pytest.mark.parametrize("what", CRAFTED)
def test_a_malformed_record_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for record in (CRAFTED[what], {"sequence": [CRAFTED[what]]}, {"mapping": {"a": CRAFTED[what]}}):
        with pytest.raises(CannotRemake, match=r"pass the method: load") as caught:
            remake(record)
        assert len(str(caught.value)) < 400
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [1 << 31, 1 << 40, 1 << 70, 1e15, 150.5, -1, -(1 << 70), "x"])
@pytest.mark.parametrize("method, option", [("two_stage", "draws"), ("fedsvi", "local_steps")])
def test_a_count_without_bound_is_refused_by_its_name(
    method: str, option: str, count: object
) -> None:
    recipe = {"made_by": f"hierfl.methods.{method}", "with": {option: count}}
    with pytest.raises(CannotRemake, match=f"'{option}' is {count!r}, not a count below"):
        remake(recipe)
    recipe["with"] = {option: (1 << 31) - 1}  # a count: only the model is missing
    with pytest.raises(CannotRemake, match="missing a required argument: 'model'"):
        remake(recipe)


def test_a_factory_of_an_imported_module_is_never_called() -> None:
    called = []

    @recorded
    def note(**options: Any) -> types.SimpleNamespace:
        called.append(1)
        return types.SimpleNamespace()

    module = types.ModuleType("a_users_module")
    note.__module__, note.__qualname__ = "a_users_module", "note"
    module.__dict__["note"] = note
    sys.modules["a_users_module"] = module
    try:
        for form in ("made_by", "family"):
            with pytest.raises(CannotRemake, match="is not a public name of hierfl"):
                remake({form: "a_users_module:note", "with": {}})
            model = {form: "a_users_module:note", "with": {"a": 1}}
            with pytest.raises(CannotRemake, match="is not a public name of hierfl"):
                remake({"made_by": "hierfl.methods.fedsvi", "with": {"model": model}})
    finally:
        del sys.modules["a_users_module"]
    assert not called
