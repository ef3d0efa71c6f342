"""Client state in a file: the same numbers as in memory, and nothing lost when a run is killed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import hierfl
from hierfl.core.trees import tree_leaves
from hierfl.engine import client_store as table
from hierfl.engine.client_store import DamagedRow, Stored, new_stored
from hierfl.engine.federation import federate
from hierfl.engine.rounds import TABLE_FILE, begin, rounds
from hierfl.methods import fedsvi
from hierfl.runs import checkpoint as state
from tests.programs import federation, fit, regression


def own() -> Any:
    return {
        "loc": torch.arange(3.0),
        "deep": {"scale": torch.ones(2, 2), "count": torch.zeros((), dtype=torch.int64)},
    }


def rows(*values: float) -> Any:
    return {
        "loc": torch.tensor(values)[:, None] * torch.ones(3),
        "deep": {
            "scale": torch.tensor(values)[:, None, None].expand(-1, 2, 2),
            "count": torch.tensor(values).long(),
        },
    }


def same(a: Any, b: Any) -> bool:
    return all(
        torch.equal(u, v) and u.dtype == v.dtype
        for u, v in zip(tree_leaves(a), tree_leaves(b), strict=True)
    )


@pytest.fixture
def in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "IN_MEMORY", 0)


def test_rows_come_back_and_only_those_written_take_space(tmp_path: Path) -> None:
    stored = new_stored(own(), 100_000, tmp_path / "rows.bin")
    stored.put(torch.tensor([99_999, 7]), rows(1.0, 2.0))
    assert same(stored.taken(torch.tensor([7, 99_999])), rows(2.0, 1.0))
    begun = stored.taken(torch.tensor([3]))
    assert (
        torch.equal(begun["loc"][0], own()["loc"]) and begun["deep"]["count"].dtype == torch.int64
    )
    stored.put(torch.tensor([7]), rows(5.0))
    assert same(stored.taken(torch.tensor([7])), rows(5.0))
    assert (tmp_path / "rows.bin").stat().st_size == 2 * stored.row_bytes
    assert same(table.subset(stored, torch.tensor([7, 3])).taken(torch.tensor([0])), rows(5.0))


def test_what_a_checkpoint_points_to_is_not_written_over(tmp_path: Path) -> None:
    stored = new_stored(own(), 3, tmp_path / "rows.bin")
    stored.put(torch.arange(3), rows(1.0, 2.0, 3.0))
    first = {name: value.clone() for name, value in stored.index().items()}
    stored.pin([first])
    stored.put(torch.arange(2), rows(4.0, 5.0))
    stored.put(torch.arange(2), rows(6.0, 7.0))  # these two have new places already
    assert same(stored.at(stored.path, first).taken(torch.arange(3)), rows(1.0, 2.0, 3.0))
    assert stored.used == 5
    stored.pin([{name: value.clone() for name, value in stored.index().items()}])
    stored.put(torch.arange(2), rows(8.0, 9.0))
    assert stored.used == 5, "free places are used again"


def test_a_changed_row_is_refused_by_name(tmp_path: Path) -> None:
    stored = new_stored(own(), 3, tmp_path / "rows.bin")
    stored.put(torch.arange(2), rows(1.0, 2.0))
    content = bytearray(stored.path.read_bytes())
    content[stored.row_bytes + 1] ^= 1
    stored.path.write_bytes(content)
    assert same(stored.taken(torch.tensor([0])), rows(1.0))
    with pytest.raises(DamagedRow, match=r"rows\.bin' is truncated or changed: the row of client"):
        stored.taken(torch.tensor([1]))


def test_rows_in_a_file_are_fitted_as_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, method = federation(), fedsvi(regression)
    inside = fit(method, data, rounds=4, cohort=2)
    monkeypatch.setattr(table, "IN_MEMORY", 0)
    outside = fit(method, data, rounds=4, cohort=2, checkpoint=tmp_path / "run")
    assert isinstance(outside.progress.table, Stored)
    assert same(outside.progress.table.taken(torch.arange(4)), inside.progress.table)
    assert torch.equal(outside.predict(data, draws=3).mean, inside.predict(data, draws=3).mean)
    assert same(*(fitted.personalize(data, rounds=2).draws(3).own for fitted in (outside, inside)))
    outside.save(tmp_path / "saved")
    outside.save(tmp_path / "saved")
    for folder in ("saved", "run"):
        again = hierfl.load(tmp_path / folder, method=method, data=data)
        assert same(again.progress.table.taken(torch.arange(4)), inside.progress.table)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, in_a_file: None) -> None:
    data, method = federation(), fedsvi(regression)
    whole = fit(method, data, rounds=9, cohort=2)
    fit(method, data, rounds=9, cohort=2, checkpoint=tmp_path, checkpoint_every=3)
    shutil.rmtree(state.checkpoints(tmp_path)[-1])
    run = federate(method, data, cohort=2)
    at = state.load(tmp_path, begin(run, tmp_path))
    assert at.round == 6
    list(rounds(run, at, 8))  # two rounds after the last checkpoint, then the process ends
    found = fit(
        method, data, rounds=9, cohort=2, checkpoint=tmp_path, checkpoint_every=3, resume=True
    )
    assert same(
        found.progress.table.taken(torch.arange(4)), whole.progress.table.taken(torch.arange(4))
    )
    assert same(found.progress.server, whole.progress.server)


def test_a_file_that_is_cut_is_refused(tmp_path: Path, in_a_file: None) -> None:
    data, method = federation(), fedsvi(regression)
    fit(method, data, rounds=2, checkpoint=tmp_path)
    (tmp_path / TABLE_FILE).write_bytes(b"")
    with pytest.raises(state.CheckpointError, match=f"{TABLE_FILE} is truncated or missing"):
        hierfl.load(tmp_path, method=method, data=data)
