"""Many clients: the memory of a round is that of its cohort."""

from __future__ import annotations

import tracemalloc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hierfl
from hierfl import guides
from hierfl.data import ClientData
from hierfl.engine import Federation, Progress, begin, one_round
from hierfl.federation import federate
from hierfl.methods import fedsvi
from hierfl.trees import tree_leaves
from tests.programs import logistic

ROWS, FEATURES, COHORT = 20, 2, 100


class Allocated(TorchDispatchMode):
    """Bytes of tensors made since it was entered: now, and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs), made=False)
        out = func(*args, **(kwargs or {}))
        self._see(out, made=True)
        return out

    def _see(self, tree: Any, *, made: bool) -> None:
        """What is first met as an argument was there before; what is first met as a result was made."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.known:
                storage = leaf.untyped_storage()
                size = storage.nbytes() if made else 0
                self.known.add(storage._cdata)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, size)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def many(n: int) -> ClientData:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n * ROWS, FEATURES, generator=g)
    ids = torch.arange(n).repeat_interleave(ROWS)
    return ClientData.from_arrays(ids, x=x, ill=(torch.rand(n * ROWS, generator=g) < 0.5).to(x.dtype))


def peak_of_a_round(n: int, family: Any) -> tuple[int, int]:
    """Most bytes of tensors, and of Python's own objects, above what stood before the round."""
    run: Federation = federate(fedsvi(logistic, family), many(n), cohort=COHORT)
    at: Progress = one_round(run, begin(run), 3)  # what is made once and kept is made here
    tracemalloc.start()
    with Allocated() as tensors:
        one_round(run, at, 3)
    _, objects = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return tensors.peak, objects


@pytest.mark.parametrize("family", [guides.structured, guides.mean_field, guides.conditional])
def test_memory_of_a_round_does_not_grow_with_the_federation(family: Any) -> None:
    """1,000 clients or 10,000 of 20 rows, 100 in a round."""
    small, large = peak_of_a_round(1_000, family), peak_of_a_round(10_000, family)
    assert small[0] > 8 * COHORT * ROWS * FEATURES, "the rows of a cohort are seen, so the measure works"
    assert large[0] - small[0] < 9 * 9_000, "not even an integer a client"
    assert large[1] - small[1] < 20 * 9_000


def test_the_table_is_written_in_place() -> None:
    run = federate(fedsvi(logistic), many(1_000), cohort=COHORT)
    at = begin(run)
    before = [leaf.data_ptr() for leaf in tree_leaves(at.table)]
    after = one_round(run, at, 2)
    assert [leaf.data_ptr() for leaf in tree_leaves(after.table)] == before
    moved = (after.table["params"]["_local.loc"].flatten(1) != run.client.own["params"]["_local.loc"].flatten()).any(1)
    assert int(moved.sum()) == COHORT, "the rows of the cohort, and no other"


def test_ten_thousand_clients_are_begun_and_asked() -> None:
    data = many(10_000)
    fitted = hierfl.fit(fedsvi(logistic, guides.conditional), data, rounds=2, cohort=0.01, compile=False)
    assert set(fitted.history["clients"]) == {COHORT}
    assert fitted.predict(data.select(["17", "9999"]), draws=3).mean.shape == (2 * ROWS,)
