"""A fingerprint tells apart what computes something else, and nothing else."""

import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from hierfl import guides, models
from hierfl.program.fingerprints import PYTHON, differing, fingerprint
from hierfl.program.recipes import describe, differences

SCALE = 2.0
TABLE = np.arange(3.0)


def closure(value: Any) -> Callable[[Any], Any]:
    def inner(batch: Any) -> Any:
        return batch * value

    return inner


def nested(value: Any) -> Callable[[Any], Any]:
    outer = closure(value)
    return lambda batch: outer(batch) + 1.0


def reads_globals(batch: Any) -> Any:
    return helper(batch) * SCALE + TABLE[0]


def helper(batch: Any) -> Any:
    return batch + 1.0


@dataclass(frozen=True)
class Settings:
    scale: float


class Scaled:
    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, batch: Any) -> Any:
        return batch * self._scale


class Network(nn.Module):
    def __init__(self, power: float = 1.0, frozen: float | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.power = power
        if frozen is not None:
            self.fixed = nn.Parameter(torch.full((2,), frozen), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x) ** self.power
        return output


def compiled(source: str, name: str = "model", **values: Any) -> Any:
    """Return a function of a user's module that is written as `source`."""
    names = {"__name__": "a_users_module", "pyro": pyro, "dist": dist, "torch": torch, **values}
    exec(compile(source, "a_users_file.py", "exec"), names)
    return names[name]


def written(constant: str = "1.0", doc: str = "'''A model.'''", blank: str = "") -> Any:
    return compiled(f"{blank}def model(batch):\n    {doc}\n    return batch.y + {constant}\n")


def sequential(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), *layers, nn.Linear(3, 1))


def seeded(seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    return describe(models.bayesian_network(nn.Linear(2, 1), **options))


# Two values of a closure, and where in it they differ.
VALUES: dict[str, tuple[Any, Any, str]] = {
    "a number of the closure": (1.0, 2.0, ""),
    "0 and -0": (0.0, -0.0, ""),
    "1 and True": (1, True, ""),
    "a tensor of the closure": (torch.ones(2), torch.zeros(2), ""),
    "an array": (np.ones(2), np.ones((2, 1)), ""),
    "a list": ([1, 2], [1, 3], ""),
    "a mapping": ({"a": torch.ones(1)}, {"a": torch.zeros(1)}, "'a' of "),
    "a namespace": (
        SimpleNamespace(scale=1.0),
        SimpleNamespace(scale=2.0),
        "attribute 'scale' of ",
    ),
    "a dataclass": (Settings(1.0), Settings(2.0), "attribute 'scale' of "),
    "a distribution": (dist.Normal(0.0, 1.0), dist.Normal(0.0, 2.0), "attribute 'scale' of "),
    "a distribution within": (
        dist.Normal(torch.zeros(2), 1.0).to_event(1),
        dist.Normal(torch.zeros(2), 2.0).to_event(1),
        "attribute 'scale' of attribute 'base_dist' of ",
    ),
    "a model of hierfl": (
        models.regression("gaussian", prior_scale=1.0),
        models.regression("gaussian", prior_scale=2.0),
        "attribute 'prior_scale' of ",
    ),
    "a guide family": (guides.low_rank(rank=2), guides.low_rank(rank=3), "attribute 'options' of "),
}
# What it is -> two of them, and the part in which they differ.
OTHERS: dict[str, tuple[Any, Any, str]] = {
    "code": (written("1.0"), written("1.0 * batch.y"), "code"),
    "a constant": (written("1.0"), written("2.0"), "code"),
    "a constant of another type": (written("1.0"), written("1"), "code"),
    "a set of constants": (written("(batch.y in {1, 2})"), written("(batch.y in {1, 3})"), "code"),
    "code of an inner function": (
        compiled("def model(b):\n    def f():\n        return b\n    return f()\n"),
        compiled("def model(b):\n    def f():\n        return b + 1\n    return f()\n"),
        "code",
    ),
    "a closure's closure": (
        nested(1.0),
        nested(2.0),
        "value of closure's 'value' of closure's 'outer'",
    ),
    "a callable object": (Scaled(1.0), Scaled(2.0), "value of attribute '_scale'"),
    "a method": (
        Scaled(1.0).__call__,
        Scaled(2.0).__call__,
        "value of attribute '_scale' of attribute 'self'",
    ),
    "a partial": (
        partial(helper, 1.0),
        partial(helper, 2.0),
        "value of attribute 'args'",
    ),
    "a default": (
        compiled("def model(b, s=1.0):\n    return s\n"),
        compiled("def model(b, s=2.0):\n    return s\n"),
        "value of default of 's'",
    ),
    "a default by keyword": (
        compiled("def model(b, *, s=1.0):\n    return s\n"),
        compiled("def model(b, *, s=2.0):\n    return s\n"),
        "value of default of 's'",
    ),
    "a global": (
        compiled("def model(b):\n    return S\n", S=1.0),
        compiled("def model(b):\n    return S\n", S=2.0),
        "value of global 'S'",
    ),
    "a global function": (
        compiled("def f(b):\n    return b\ndef model(b):\n    return f(b)\n"),
        compiled("def f(b):\n    return -b\ndef model(b):\n    return f(b)\n"),
        "code of global 'f'",
    ),
    "a class": (
        compiled(
            "class C:\n    def f(self):\n        return 1\ndef model(b):\n    return C().f()\n"
        ),
        compiled(
            "class C:\n    def f(self):\n        return 2\ndef model(b):\n    return C().f()\n"
        ),
        "code of method 'f' of global 'C'",
    ),
    "a function of torch": (
        compiled("def model(b):\n    return f(b)\n", f=torch.exp),
        compiled("def model(b):\n    return f(b)\n", f=torch.sin),
        "name of global 'f'",
    ),
    "layers": (sequential(nn.Tanh()), sequential(nn.ReLU()), "layers"),
    "shapes": (nn.Linear(2, 1, bias=False), nn.Linear(3, 1, bias=False), "weight 'weight'"),
    "an attribute of a module": (Network(1.0), Network(2.0), "value of attribute 'power'"),
    "a frozen weight": (Network(frozen=1.0), Network(frozen=2.0), "weight 'fixed'"),
    "dropout": (
        sequential(nn.Dropout(0.5)).train(),
        sequential(nn.Dropout(0.5)).eval(),
        "value of attribute 'training' of layer '1'",
    ),
    **{
        what: (closure(one), closure(other), f"value of {where}closure's 'value'")
        for what, (one, other, where) in VALUES.items()
    },
}
SAME: dict[str, tuple[Any, Any]] = {
    "lines": (written(), written(blank="\n\n")),
    "a docstring": (written(), written(doc="'''Another one.'''")),
    "no docstring": (written(), written(doc="'''A model.'''")),
    "a closure": (closure(1.0), closure(1.0)),
    "tensors": (closure(torch.ones(3)), closure(torch.ones(3))),
    "weights that are learned": (nn.Linear(2, 1), nn.Linear(2, 1)),
    "weights of a network": (Network(), Network()),
    "training where nothing depends on it": (sequential().train(), sequential().eval()),
    "a field of a global's name": (
        compiled("def model(b):\n    return b.x\n", x=1.0),
        compiled("def model(b):\n    return b.x\n", x=2.0),
    ),
    "generators": (closure(torch.Generator()), closure(torch.Generator().manual_seed(1))),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_differs_is_named(what: str) -> None:
    first, two, part = OTHERS[what]
    assert part in differing(fingerprint(first), fingerprint(two))
    assert not differing(fingerprint(first), fingerprint(first))


@pytest.mark.parametrize("what", SAME)
def test_what_computes_the_same_is_the_same(what: str) -> None:
    first, two = SAME[what]
    assert not differing(fingerprint(first), fingerprint(two))


def test_globals_are_followed_through_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(reads_globals)
    assert {"code of global 'helper'", "value of global 'SCALE'"} <= set(before)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    monkeypatch.setitem(globals(), "helper", closure(1.0))
    assert {"value of global 'SCALE'", "code of global 'helper'"} <= set(
        differing(before, fingerprint(reads_globals))
    )


def test_a_function_that_refers_to_itself_ends() -> None:
    def again(n: int) -> int:
        return again(n - 1) if n else 0

    assert fingerprint(again) == fingerprint(again)


def test_fixed_weights_count_where_the_prior_is_fixed_at_them() -> None:
    assert seeded(0, prior_loc="learned") == seeded(1, prior_loc="learned")
    first, two = seeded(0, prior_loc="module"), seeded(1, prior_loc="module")
    assert differences(first, two).differs == ["module: weight 'weight'", "module: weight 'bias'"]


def test_it_holds_no_value() -> None:
    """Closures may hold rows: a record holds their hashes alone."""
    lines = fingerprint(closure({"name": "Ann Smith", "y": torch.tensor([41.5])}))
    assert "Ann" not in str(lines) and "41.5" not in str(lines)
    assert all(len(value) == 16 for part, value in lines.items() if part != PYTHON)


def test_it_is_the_same_in_another_process(tmp_path: Path) -> None:
    """Whose order of sets is another one."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nWORDS = {'a', 'b', 'c', 'd'}\n"
        "def model(batch):\n    return [w for w in WORDS if w in {'x', 'y', 'z'}], torch.ones(2)\n"
    )
    code = (
        "import runpy, sys\nfrom hierfl.program.fingerprints import fingerprint\n"
        "model = runpy.run_path(sys.argv[1], run_name='mine')['model']\n"
        "print(sorted(fingerprint(model).items()))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=900,
    )
    here = fingerprint(runpy.run_path(str(file), run_name="mine")["model"])
    assert there.stdout.strip() == str(sorted(here.items()))


def test_code_of_another_python_is_not_compared() -> None:
    first, two = describe(closure(1.0)), describe(closure(1.0))
    two["code"] = {**two["code"], PYTHON: "cpython-399", "code": "0" * 16}
    differs, unknown = differences(two, first)
    assert not differs
    assert len(unknown) == 1 and 'compiled by "cpython-399" there' in unknown[0]
    two["code"]["value of closure's 'value'"] = "0" * 16
    assert differences(two, first).differs == ["method: value of closure's 'value'"]
