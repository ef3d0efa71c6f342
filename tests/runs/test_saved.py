"""`fit.save` and `hierfl.load`: with and without the rows, with the method rebuilt, and their errors."""

import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import guides, models
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.methods import fedavg, fedsvi, pfedbayes, pfedme
from hierfl.methods.stages import server as two_stage_server
from hierfl.methods.stages import weighting
from hierfl.optimizers import SGD, Adam, TorchOptimizer
from hierfl.program import public_names
from hierfl.program.public_names import CannotRemake
from hierfl.program.recipes import describe, remake
from tests.programs import FAMILIES, assert_close, federation, fit, regression, same
from tests.runs.fits import two_rounds
from tests.sampled import sampled


@pytest.mark.parametrize("family", sampled(FAMILIES, 3))
def test_save_and_load_round_trip(family: str, tmp_path: Path) -> None:
    fitted = fit(fedsvi(regression, FAMILIES[family]), federation(), rounds=2, seed=3)
    fitted.save(tmp_path / "run", with_data=True)
    back = hierfl.load(tmp_path / "run")
    same(fitted, back)
    assert describe(back.method) == describe(fitted.method)
    for name, value in fitted.federation.data.fields.items():
        assert torch.equal(back.federation.data.fields[name], value)
    ours, theirs = fitted.draws(5, seed=2), back.draws(5, seed=2)
    assert all(torch.equal(ours.own[k], theirs.own[k]) for k in ours.own)
    assert torch.equal(
        fitted.predict(federation(), draws=4).mean, back.predict(federation(), draws=4).mean
    )


def few_events(batch: ClientBatch) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 1.0)), pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        at = pyro.sample("at", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Bernoulli(logits=at), obs=batch.y)


def test_clients_weighted_more_draws_than_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as of more than 1,000 clients, whose log ratios a quadratic does not describe
    monkeypatch.setattr(two_stage_server, "FAR_MANY", 5)
    monkeypatch.setattr(weighting, "ROUGH", 1e-9)
    g = torch.Generator().manual_seed(0)
    rows = {f"c{k}": {"y": (torch.rand(6, generator=g) < 0.4).float()} for k in range(6)}
    data = ClientData.from_clients(rows)
    fitted = hierfl.fit(hierfl.methods.two_stage(few_events), data, progress=False)
    begun, server = fitted.federation.server.state, fitted.progress.server
    assert len(server.asked) > len(begun.asked) and len(server.each) > len(begun.each)
    fitted.save(tmp_path / "run", with_data=True)
    back = hierfl.load(tmp_path / "run", model=few_events)
    assert_close(back.progress.server, server, 0.0)


def test_rows_that_a_checkpoint_never_holds_must_be_handed_in(tmp_path: Path) -> None:
    fit(fedsvi(regression), federation(), rounds=1, checkpoint=tmp_path)
    with pytest.raises(
        hierfl.RowsNotSaved,
        match=r"saved without the clients' rows: pass the clients' rows, load\(\.\.\., data=",
    ):
        hierfl.load(tmp_path)


def test_a_checkpoint_loads_with_client_names_and_features(tmp_path: Path) -> None:
    data = federation()
    named = hierfl.ClientData(
        data.fields, data.offsets, data.names, data.client_fields, {"x": ("age", "dose")}
    )
    fitted = fit(fedsvi(regression), named, rounds=3, checkpoint=tmp_path)
    same(fitted, hierfl.load(tmp_path, data=named))
    fitted.save(tmp_path / "whole", with_data=True)
    back = hierfl.load(tmp_path / "whole")
    assert back.federation.data.features == {"x": ("age", "dose")}
    assert torch.equal(back.federation.data.client_fields["height"], data.client_fields["height"])


def test_new_clients_are_saved_and_loaded(tmp_path: Path) -> None:
    new = two_rounds().personalize(
        replace(federation((4, 2), seed=8), names=("new", "newer")), rounds=3
    )
    new.save(tmp_path, with_data=True)
    back = hierfl.load(tmp_path)
    same(new, back)
    assert torch.equal(new.draws(3).own["slope"], back.draws(3).own["slope"])


def test_saving_again_replaces_what_was_saved(tmp_path: Path) -> None:
    """The same run, with rows and without; what is of another run has tests in test_run_folder.py."""
    for with_data in (False, True, False):
        two_rounds().save(tmp_path, with_data=with_data)
        same(two_rounds(), hierfl.load(tmp_path))
        assert [p.name for p in tmp_path.iterdir()] == ["round-00000002"]
        assert (tmp_path / "round-00000002" / "local-rows.safetensors").exists() == with_data


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(hierfl.CheckpointError, match="holds no hierfl run"):
            hierfl.load(folder)
    (tmp_path / "round-00000001").mkdir()
    (tmp_path / "round-00000001" / "state.json").write_text("{}")
    with pytest.raises(
        hierfl.CheckpointError,
        match=r"no checkpoint can be read: round-00000001: .*does not belong to a hierfl run",
    ):
        hierfl.load(tmp_path)


def test_damaged_rows_are_refused_by_name(tmp_path: Path) -> None:
    two_rounds().save(tmp_path, with_data=True)
    rows = tmp_path / "round-00000002" / "local-rows.safetensors"
    rows.write_bytes(rows.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"local-rows.safetensors"):
        hierfl.load(tmp_path)


@hierfl.model(name="scaled by 2.5")
def scaled(batch: Any) -> None:
    regression(batch)


@hierfl.guide
def own_guide(batch: Any) -> None:
    pyro.sample("mu", dist.Delta(pyro.param("at", torch.zeros(()))))


REMADE: dict[str, Callable[[], Any]] = {
    "hierfl's": lambda: fedsvi(
        models.regression("bernoulli"),
        guides.structured(full=True),
        optimizer=SGD(0.1, momentum=0.5),
    ),
    "shared posterior": lambda: fedsvi(
        models.regression(), guides.conditional(shared=guides.diagonal_normal, newton_steps=0)
    ),
    "torch's optimizer": lambda: fedsvi(
        regression, optimizer=TorchOptimizer(torch.optim.NAdam, {"lr": 0.01, "betas": (0.8, 0.9)})
    ),
    "a model of one's own": lambda: fedsvi(regression, optimizer=Adam(0.1, betas=(0.5, 0.6))),
    "one under another name": lambda: fedsvi(scaled, own_guide),
    "fedavg": lambda: fedavg(regression, steps=3, prox=0.5, unit="epoch"),
    "pfedme": lambda: pfedme(regression, prox=3.0),
    "pfedbayes": lambda: pfedbayes(regression, kl_weight=3.0),
    "a prior": lambda: fedsvi(models.regression("gaussian", prior_scale=dist.HalfNormal(2.0))),
    "tensors": lambda: fedsvi(models.regression("gaussian", prior_scale=torch.tensor([0.5, 2.0]))),
}


@pytest.mark.parametrize("what", REMADE)
def test_a_method_is_rebuilt_from_its_record(what: str) -> None:
    record = describe(REMADE[what]())
    again = remake(record)
    assert isinstance(again, hierfl.Method)
    assert describe(again) == record


UNMADE: dict[str, Callable[[], Any]] = {
    "a closure": lambda: lambda batch: regression(batch),
    "a module": lambda: models.network(torch.nn.Linear(2, 2)),
    "a partial": lambda: partial(regression),
}


@pytest.mark.parametrize("what", UNMADE)
def test_a_method_that_cannot_be_rebuilt_must_be_passed(what: str) -> None:
    record = describe(fedsvi(UNMADE[what]()))
    with pytest.raises(
        CannotRemake,
        match=r"is not stored in a file; (mark it in this program, @hierfl.model, or )?pass (it|the method)",
    ):
        remake(record)


def test_loading_imports_nothing_that_a_file_names(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(CannotRemake, match="'evil:model' is not a public name of hierfl: pass"):
            remake({"named": "evil:model"})
    finally:
        sys.path.remove(str(tmp_path))
    with pytest.raises(CannotRemake, match=r"'hierfl.methods:nothing' is not a public name of"):
        remake({"named": "hierfl.methods:nothing"})
    for name in ("nothing", "fit", "federation"):
        with pytest.raises(CannotRemake, match=f"'tests.programs:{name}' is not marked in this"):
            remake(
                {
                    "made_by": "hierfl.methods.fedsvi",
                    "with": {"model": {"named": f"tests.programs:{name}"}},
                }
            )


def test_a_model_of_another_script_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pyro, pyro.distributions as dist, hierfl\n@hierfl.model\ndef my_model(batch):\n   "
        " with batch.clients():\n        w = pyro.sample('w', dist.Normal(0., 1.))\n        with "
        "batch.data():\n            pyro.sample('y', dist.Normal(w, 1.), obs=batch.y)\ndata = "
        "hierfl.ClientData.from_clients({'a': {'y': [1., 2.]}})\nfit = "
        "hierfl.fit(hierfl.methods.fedsvi(my_model), data, rounds=1, "
        f"settings=hierfl.Settings(compile=False))\nfit.save({str(tmp_path / 'run')!r})\nassert "
        f"hierfl.load({str(tmp_path / 'run')!r}).clients == ('a',)\n"
    )
    with monkeypatch.context() as patch:  # what one script marks, the other has not marked
        patch.setattr(public_names, "_MARKED", {})
        runpy.run_path(str(script), run_name="__main__")
    with pytest.raises(CannotRemake, match=r"'my_model' is not marked .*pass it: load"):
        hierfl.load(tmp_path / "run")
