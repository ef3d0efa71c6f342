"""`fit.save` and `hierfl.load`: with and without the rows, with the method rebuilt, and their errors."""

import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hierfl
from hierfl import CannotRemake, models
from hierfl.methods import fedsvi
from hierfl.methods.stages import server as two_stage_server
from hierfl.methods.stages import weighting
from hierfl.program import public_names
from hierfl.program.recipes import describe, remake
from tests.programs import FAMILIES, assert_close, federation, fit, regression, same
from tests.runs.fits import two_rounds, with_features
from tests.sampled import sampled
from tests.summaries import programs


@pytest.mark.parametrize("family", sampled(FAMILIES, 3))
def test_save_and_load_round_trip(family: str, tmp_path: Path) -> None:
    fitted = fit(fedsvi(regression, FAMILIES[family]), federation(), rounds=2, seed=3)
    fitted.save(tmp_path / "run", with_data=True)
    back = hierfl.load(tmp_path / "run")
    same(fitted, back)
    assert describe(back.method) == describe(fitted.method)
    for name, value in fitted.federation.data.fields.items():
        assert torch.equal(back.federation.data.fields[name], value)
    assert_close(fitted.draws(5, seed=2).own, back.draws(5, seed=2).own, 0.0)
    ours, theirs = (of.predict(federation(), draws=4).mean for of in (fitted, back))
    assert torch.equal(ours, theirs)


def test_clients_weighted_more_draws_than_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as of more than 1,000 clients, whose log ratios a quadratic does not describe
    monkeypatch.setattr(two_stage_server, "FAR_MANY", 5)
    monkeypatch.setattr(weighting, "ROUGH", 1e-9)
    fitted = fit(hierfl.methods.two_stage(programs.binary), programs.people((6,) * 6))
    begun, server = fitted.federation.server.state, fitted.progress.server
    assert len(server.asked) > len(begun.asked) and len(server.each) > len(begun.each)
    fitted.save(tmp_path / "run", with_data=True)
    back = hierfl.load(tmp_path / "run", model=programs.binary)
    assert_close(back.progress.server, server, 0.0)


def test_rows_that_a_checkpoint_never_holds_must_be_handed_in(tmp_path: Path) -> None:
    fit(fedsvi(regression), federation(), rounds=1, checkpoint=tmp_path)
    with pytest.raises(
        hierfl.RowsNotSaved,
        match=r"saved without the clients' rows: pass the clients' rows, load\(\.\.\., data=",
    ):
        hierfl.load(tmp_path)


def test_a_checkpoint_loads_with_client_names_and_features(tmp_path: Path) -> None:
    named = with_features()
    fitted = fit(fedsvi(regression), named, rounds=3, checkpoint=tmp_path)
    same(fitted, hierfl.load(tmp_path, data=named))
    fitted.save(tmp_path / "whole", with_data=True)
    back = hierfl.load(tmp_path / "whole")
    assert back.federation.data.features == {"x": ("age", "dose")}
    assert torch.equal(back.federation.data.client_fields["height"], named.client_fields["height"])


def test_new_clients_are_saved_and_loaded(tmp_path: Path) -> None:
    clients = replace(federation((4, 2), seed=8), names=("new", "newer"))
    new = two_rounds().personalize(clients, rounds=3)
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
