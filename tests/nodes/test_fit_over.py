"""`hierfl.fit(model, nodes=...)` is `hierfl.fit(model, data)`, and refuses by name what means nothing over nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import hierfl
from hierfl import methods
from hierfl.core.trees import named_leaves
from hierfl.data.clients import ClientData
from hierfl.nodes import FitOverNodes, InProcess, in_process
from hierfl.runs.over_nodes import MENDS
from tests.programs import federation, fit, logistic, regression


def rows() -> ClientData:
    data = federation((5, 3, 7, 2))
    return data.select(sorted(data.names))


def same(over: FitOverNodes, here: Any) -> None:
    expected = named_leaves(here.message)
    for name, value in named_leaves(over.message).items():
        torch.testing.assert_close(value, expected[name], rtol=0.0, atol=1e-9)


def test_a_named_method_gives_the_numbers_of_a_fit_here(tmp_path: Path) -> None:
    method = methods.fedsvi(regression)
    over = hierfl.fit(method, nodes=in_process(rows(), tmp_path), rounds=3, seed=4, cohort=3)
    here = fit(method, rows(), rounds=3, seed=4, cohort=3)
    same(over, here)
    assert over.chosen is None
    (tmp_path / "east" / "policy.toml").write_text('may_leave = ["summaries"]\n')
    found = over.local_summary(50, seed=1)  # after the call has returned
    assert list(found.given) == ["east"]
    slope = here.draws(50, seed=1).own["slope"][:, here.clients.index("east")]
    assert found.table["mean"].tolist() == pytest.approx(slope.mean(0).tolist())


def test_a_model_runs_by_the_method_that_fit_chooses(tmp_path: Path) -> None:
    over = hierfl.fit(logistic, nodes=in_process(rows(), tmp_path), rounds=2, disclose="sums")
    assert over.chosen is not None and over.method.discloses == "sums"
    same(over, fit(over.method, rows(), rounds=2))


def test_a_run_that_has_ended_is_asked_again_from_its_checkpoint(tmp_path: Path) -> None:
    """As by a notebook that was restarted: no round is run twice, and the nodes answer as before."""
    how: dict[str, Any] = {"rounds": 2, "checkpoint": tmp_path / "server"}
    method = methods.fedsvi(regression)
    first = hierfl.fit(method, nodes=in_process(rows(), tmp_path / "nodes"), **how)
    (tmp_path / "nodes" / "east" / "policy.toml").write_text('may_leave = ["scores"]\n')
    before = first.scores().table
    again = hierfl.fit(method, nodes=in_process(rows(), tmp_path / "nodes"), resume=True, **how)
    assert len(again.history) == 2
    pd.testing.assert_frame_equal(again.scores().table, before)
    how["rounds"] = 4
    with pytest.raises(ValueError, match="already holds a run: continue it with resume=True"):
        hierfl.fit(method, nodes=in_process(rows(), tmp_path / "nodes"), **how)


OTHERS: dict[str, Any] = {
    "data": federation((5, 3, 7, 2)),
    "validation": federation((5, 3, 7, 2)),
    "eval_every": 5,
    "patience": 2,
    "engine": "sequential",
    "chunk": 2,
    "compile": True,
    "device": "cuda",
    "checkpoint_every": 2,
    "progress": True,
    "callback": print,
    "on_client_error": "skip",
    "min_rows": 2,
}


@pytest.mark.parametrize("name", OTHERS)
def test_arguments_that_mean_nothing_over_nodes_are_refused(name: str, tmp_path: Path) -> None:
    assert set(OTHERS) == set(MENDS)
    loose: Any = hierfl.fit
    with pytest.raises(ValueError, match=f"nodes and {name} do not go together: "):
        loose(regression, nodes=in_process(rows(), tmp_path), rounds=1, **{name: OTHERS[name]})
    assert not list(tmp_path.iterdir())  # no node was set up


def test_other_wrong_arguments_are_named(tmp_path: Path) -> None:
    loose: Any = hierfl.fit
    around = in_process(rows(), tmp_path)
    wrong: dict[str, dict[str, Any]] = {
        "nodes is a str: make it with hierfl.flower.superlink": {"nodes": "127.0.0.1:8000"},
        "rounds is '3': it must be an integer, rounds=3": {"nodes": around, "rounds": "3"},
    }
    for words, options in wrong.items():
        with pytest.raises(TypeError, match=words):
            loose(methods.fedsvi(regression), **options)
    with pytest.raises(TypeError, match="'fedsvi', which is not called yet"):
        loose(methods.fedsvi, nodes=around, rounds=1)
    with pytest.raises(TypeError, match="data is a NoneType, not ClientData"):
        loose(regression, rounds=1)
    with pytest.raises(ValueError, match="method 'two_stage' shows the server a summary"):
        loose(methods.two_stage(regression), nodes=around, disclose="sums")
    with pytest.raises(ValueError, match="resume is True, and there is no checkpoint"):
        loose(methods.fedsvi(regression), nodes=around, rounds=1, resume=True)
    with pytest.raises(ValueError, match="fewest is 5: it must be 1 to 4"):
        in_process(rows(), tmp_path, fewest=5)


def test_no_client_has_its_folder_outside(tmp_path: Path) -> None:
    names = ["..", "../up", ".a", "a", "a/b"]
    data = ClientData.from_arrays(names, x=torch.zeros(5, 1), y=torch.zeros(5))
    made: InProcess = in_process(data, tmp_path)
    found = [folder.resolve() for folder in made.folders.values()]
    assert len(set(found)) == 5 and all(folder.parent == tmp_path.resolve() for folder in found)
