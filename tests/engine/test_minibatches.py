"""The rows a client works on: reshuffled passes over its rows, whichever clients are in its chunk."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from hierfl import ClientData, Phase
from hierfl.core import noise
from hierfl.engine.minibatches import batch_of, steps
from tests.programs import federation, row_plan

COUNTS = (10, 3, 7, 1)
EVERYONE = torch.arange(4)


def phase(count: int, size: int | None, unit: Literal["step", "epoch"]) -> Phase:
    return Phase(lambda work, message, batch: work, count, unit, size)


@pytest.mark.parametrize(
    ("count", "size", "unit", "told"),
    [
        (-1, 5, "step", "of a phase is -1: it must be 0 or more"),
        (2.5, 5, "step", "it must be an integer"),
        (2, 0, "step", "batch_size is 0"),
        (2, 5, "steps", "unit is 'steps': it must be one of 'step', 'epoch'"),
    ],
)
def test_a_phase_that_is_none_is_refused(count: Any, size: int, unit: Any, told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        phase(count, size, unit)


def plan(
    data: ClientData, ids: Tensor, count: int, size: int, unit: Any, **of_round: Any
) -> list[list[list[int]]]:
    """Return for each client the rows of each of its steps, numbered within the client."""
    steps_of = phase(count, size, unit)
    index, inside, active = row_plan(data, ids, steps_of, **{"seed": 0, "at": (0, 0), **of_round})
    return [
        [
            (index[k, c][inside[k, c]] - data.offsets[place]).tolist()
            for k in active[:, c].nonzero()[:, 0]
        ]
        for c, place in enumerate(ids)
    ]


@pytest.mark.parametrize("size", [1, 3, 7, 20])
def test_epochs_go_over_every_row_once_each(size: int) -> None:
    for client, n in zip(plan(federation(COUNTS), EVERYONE, 3, size, "epoch"), COUNTS, strict=True):
        per = -(-n // size)
        assert len(client) == 3 * per
        passes = [
            [row for step in client[e * per : (e + 1) * per] for row in step] for e in range(3)
        ]
        assert all(sorted(rows) == list(range(n)) for rows in passes)
        assert all(len(step) == size for step in client if step is not client[-1] and n % size == 0)
        if n > 5:
            assert len({tuple(rows) for rows in passes}) == 3, "each pass has its own order"


@pytest.mark.parametrize("size", [1, 3, 7, 20])
def test_steps_take_equal_batches_or_all_of_a_small_client(size: int) -> None:
    for client, n in zip(plan(federation(COUNTS), EVERYONE, 9, size, "step"), COUNTS, strict=True):
        assert len(client) == 9
        assert all(len(rows) == min(size, n) == len(set(rows)) for rows in client)
        per = max(1, n // size)
        for e in range(9 // per):
            rows = [row for step in client[e * per : (e + 1) * per] for row in step]
            assert len(rows) == len(set(rows)), "no row comes twice within a pass"
        assert all(0 <= row < n for rows in client for row in rows)


def test_every_row_is_as_likely_in_a_step() -> None:
    data = federation((5, 3))
    seen = torch.zeros(5)
    for round_ in range(300):
        for row in plan(data, torch.tensor([0]), 1, 2, "step", at=(round_, 0))[0][0]:
            seen[row] += 1
    assert bool(((seen / 300 - 0.4).abs() < 4 * (0.24 / 300) ** 0.5).all())


@pytest.mark.parametrize("unit", ["step", "epoch"])
@pytest.mark.parametrize("size", [2, 4, 20])
def test_a_clients_rows_do_not_depend_on_the_others(unit: str, size: int) -> None:
    data = federation(COUNTS)
    together = plan(data, EVERYONE, 3, size, unit)
    for ids in ([2], [3, 2], [2, 0]):
        apart = plan(data, torch.tensor(ids), 3, size, unit)
        for c, k in enumerate(ids):
            assert apart[c] == together[k]


def test_rows_depend_on_seed_round_and_phase() -> None:
    data = federation(COUNTS)
    base = plan(data, EVERYONE, 3, 2, "step")
    assert base == plan(data, EVERYONE, 3, 2, "step")
    for change in ({"seed": 1}, {"at": (1, 0)}, {"at": (0, 1)}, {"seed": 2**32}):
        assert plan(data, EVERYONE, 3, 2, "step", **change) != base


def test_no_steps_and_all_rows() -> None:
    data = federation(COUNTS)
    assert list(steps(data, EVERYONE, phase(0, 2, "step"), seed=0, at=(0, 0))) == []
    assert list(steps(data, EVERYONE, phase(0, None, "step"), seed=0, at=(0, 0))) == []
    on_all = phase(2, None, "step")
    whole = list(steps(data, EVERYONE, on_all, seed=0, at=(0, 0)))
    assert [active for _, active in whole] == [(), ()]
    first, second = (batch_of(tensors, on_all) for tensors, _ in whole)
    assert not first.is_mini_batch
    assert first.mask().sum(1).tolist() == list(COUNTS)
    assert not torch.equal(first.key, second.key), "each step has its own noise"
    with pytest.raises(ValueError, match="no row plan"):
        row_plan(data, EVERYONE, phase(1, None, "step"), seed=0, at=(0,))


def test_a_small_client_that_is_done_is_not_shuffled_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With batches of 10, a client of 10 rows beside one of 2,000 is done after 1 of 200 steps.

    All rows are shuffled once.
    """
    shuffles = []
    permutations = noise.permutations

    def counted(key: Tensor, counts: Tensor, width: int) -> Tensor:
        shuffles.append(width)
        return permutations(key, counts, width)

    monkeypatch.setattr(noise, "permutations", counted)
    index, _, active = row_plan(
        federation((2000, 10)), torch.arange(2), phase(1, 10, "epoch"), seed=0, at=(0, 0)
    )
    assert active[:, 1].tolist() == [True] + [False] * 199
    assert index.shape == (200, 2, 10)
    assert len(shuffles) == 1


@pytest.mark.parametrize("unit", ["step", "epoch"])
@pytest.mark.parametrize("counts", [(500, 2, 2, 3, 17), (40, 20), (7, 7, 7)])
def test_the_plan_is_the_same_in_blocks_and_in_tables_by_length(
    unit: Any, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, ids = federation(counts), torch.arange(len(counts))

    def all_steps() -> list[Any]:
        return [
            (tensors["fields"]["y"], tensors["rows"].get("rows"), tensors["keys"], *active)
            for tensors, active in steps(data, ids, phase(3, 7, unit), seed=1, at=(0, 1))
        ]

    whole = all_steps()
    monkeypatch.setattr("hierfl.engine.minibatches.PLANNED", 1)  # a step at a time
    monkeypatch.setattr("hierfl.engine.minibatches.FEW_PLACES", 1)
    for one, other in zip(whole, all_steps(), strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def test_all_rows_in_few_widths() -> None:
    """Compiled steps: the rows are the same, padded to one of few widths, never wider than the longest client."""
    data = federation((103, 70, 129, 131))
    phase_ = phase(1, None, "step")
    for ids, width in (([0, 1], 112), ([1], 80), ([0, 2], 131), ([3], 131)):
        places = torch.tensor(ids)
        exact, padded = (
            next(iter(steps(data, places, phase_, seed=0, at=(0, 0), few_widths=few)))[0]
            for few in (False, True)
        )
        counts = data.counts[places]
        assert padded["fields"]["x"].shape[0] == len(ids) * width
        assert torch.equal(padded["counts"], exact["counts"])
        inside = padded["rows"].get("rows", torch.ones(len(ids), width, dtype=torch.bool))
        assert torch.equal(inside.sum(1), counts)
        for k, count in enumerate(counts.tolist()):
            one, other = (v["fields"]["x"].unflatten(0, (len(ids), -1))[k] for v in (exact, padded))
            assert torch.equal(one[:count], other[:count])
    assert torch.equal(exact["fields"]["x"], padded["fields"]["x"]) and padded["rows"] == {}


def test_a_step_that_scores_no_rows_is_given_them_in_order() -> None:
    """Shuffling rows that nothing reads would take as long as for a step on all of them."""
    data = federation(COUNTS)
    unscored = Phase(lambda work, message, batch: work, 1, "step", 1, scores_rows=False)
    [(tensors, _)] = steps(data, EVERYONE, unscored, seed=3, at=(0, 0))
    for name, values in data.fields.items():
        assert torch.equal(tensors["fields"][name], values[data.offsets[:4]]), name
