"""Support and query: two halves of each client's rows, drawn anew in each round."""

from typing import Any, Literal

import pytest
import torch

from hierfl import ClientBatch, Phase
from hierfl.engine.minibatches import batch_of, steps
from tests.programs import federation, row_plan

COUNTS = (10, 3, 7, 1, 2)
DATA = federation(COUNTS)
EVERYONE = torch.arange(len(COUNTS))


def phase(rows: Literal["all", "support", "query"], size: int | None = None) -> Phase:
    return Phase(lambda work, message, batch: work, 1, "epoch", size, rows)


def batches(of: Phase, *, ids: Any = EVERYONE, at: tuple[int, int] = (0, 0)) -> list[ClientBatch]:
    return [batch_of(tensors, of) for tensors, _ in steps(DATA, ids, of, seed=3, at=at)]


def labels(of: Phase, **options: Any) -> list[set[float]]:
    """Return the labels, which are all different, of the rows that each client works on."""
    found: list[set[float]] = [set() for _ in options.get("ids", EVERYONE)]
    for batch in batches(of, **options):
        for k, own in enumerate(found):
            own |= set(batch.y[k][batch.mask()[k]].tolist())
    return found


@pytest.mark.parametrize("size", [None, 1, 2, 3, 20])
def test_the_halves_share_no_row_and_leave_none_out(size: int | None) -> None:
    support, query = labels(phase("support", size)), labels(phase("query", size), at=(0, 1))
    assert [len(rows) for rows in support] == [5, 2, 4, 1, 1]
    assert [len(rows) for rows in query] == [5, 1, 3, 1, 1]
    for k, every in enumerate(labels(phase("all"))):
        assert support[k] | query[k] == every
        assert COUNTS[k] == 1 or not support[k] & query[k]


def test_the_halves_are_those_of_the_round_whatever_the_phase_and_the_batches() -> None:
    whole = labels(phase("query"))
    assert whole == labels(phase("query", 2), at=(0, 1))
    assert whole != labels(phase("query"), at=(1, 0))


def test_a_clients_half_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    together = labels(phase("support", 2))
    for ids in ([2], [4, 2], [0, 0]):
        assert labels(phase("support", 2), ids=torch.tensor(ids)) == [together[k] for k in ids]
    monkeypatch.setattr("hierfl.engine.minibatches.FEW_PLACES", 1)
    assert labels(phase("support", 2)) == together


@pytest.mark.parametrize("size", [None, 2])
def test_to_the_phase_the_half_is_all_that_the_client_has(size: int | None) -> None:
    """The mean loss is that of the half's rows: their number is the batch's count."""
    for rows, counts in (("support", [5, 2, 4, 1, 1]), ("query", [5, 1, 3, 1, 1])):
        for batch in batches(phase(rows, size)):  # type: ignore[arg-type]
            assert batch.counts.tolist() == counts
    [whole] = batches(phase("support"))
    assert whole.mask().sum(1).tolist() == [5, 2, 4, 1, 1]
    for k, own in enumerate(whole.y):
        first = DATA.fields["y"][DATA.offsets[k]]
        assert bool((own[~whole.mask()[k]] == first).all()), "padding is a row of its own client"


@pytest.mark.parametrize(("rows", "counts"), [("all", COUNTS), ("support", (5, 2, 4, 1, 1))])
def test_a_plan_goes_once_through_each_clients_rows(rows: Any, counts: tuple[int, ...]) -> None:
    index, inside, active = row_plan(DATA, EVERYONE, phase(rows, 2), seed=3, at=(0, 0))
    assert (inside & active[..., None]).sum((0, 2)).tolist() == list(counts)
    assert bool((DATA.row_client[index] == EVERYONE[None, :, None]).all())
