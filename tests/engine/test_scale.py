"""Many clients: a round takes the memory of its cohort."""

import tracemalloc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hierfl
from hierfl import ClientData, guides
from hierfl.core.trees import tree_leaves
from hierfl.data.batch import cut_ragged
from hierfl.diagnostics.nuts import check_padded
from hierfl.engine.federation import Federation, federate
from hierfl.engine.rounds import Progress, begin, one_round
from hierfl.methods import fedsvi
from tests.programs import logistic

ROWS, FEATURES, COHORT = 20, 2, 100


class Allocated(TorchDispatchMode):
    """Bytes of tensors made since it was entered: `now`, and at most, `peak`."""

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
        """Count tensors that are first seen as results; those first seen as arguments were there before."""
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
    return ClientData.from_arrays(
        ids, x=x, ill=(torch.rand(n * ROWS, generator=g) < 0.5).to(x.dtype)
    )


def peak_of_a_round(n: int, family: Any) -> tuple[int, int]:
    """Return the peak bytes of tensors, and of Python objects, that a round adds."""
    run: Federation = federate(fedsvi(logistic, family), many(n), cohort=COHORT)
    at: Progress = one_round(run, begin(run), 3)  # caches are filled here
    tracemalloc.start()
    with Allocated() as tensors:
        one_round(run, at, 3)
    _, objects = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return tensors.peak, objects


@pytest.mark.slow("conditional")
@pytest.mark.parametrize("family", [guides.structured, guides.mean_field, guides.conditional])
def test_memory_of_a_round_does_not_grow_with_the_federation(family: Any) -> None:
    """1,000 or 10,000 clients with 20 rows each, 100 of them in a round."""
    small, large = peak_of_a_round(1_000, family), peak_of_a_round(10_000, family)
    assert small[0] > 8 * COHORT * ROWS * FEATURES, (
        "the rows of a cohort are counted, so the measure works"
    )
    assert large[0] - small[0] < 9 * 9_000, "less than one integer a client"
    assert large[1] - small[1] < 20 * 9_000


def test_the_table_is_written_in_place() -> None:
    run = federate(fedsvi(logistic), many(1_000), cohort=COHORT)
    at = begin(run)
    before = [leaf.data_ptr() for leaf in tree_leaves(at.table)]
    after = one_round(run, at, 2)
    assert [leaf.data_ptr() for leaf in tree_leaves(after.table)] == before
    moved = (
        after.table.at.params["_local.loc"].flatten(1)
        != run.client.own.at.params["_local.loc"].flatten()
    ).any(1)
    assert int(moved.sum()) == COHORT, "rows of the cohort alone"


def ragged(longest: int, others: int) -> ClientData:
    """One client with many rows beside many clients of two."""
    counts = torch.tensor([2] * (others // 2) + [longest] + [2] * (others - others // 2))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(int(counts.sum()), FEATURES, generator=g)
    y = (torch.rand(len(x), generator=g) < 0.5).to(x.dtype)
    ids = torch.repeat_interleave(torch.arange(others + 1), counts)
    return ClientData.from_arrays(ids, x=x, ill=y)


@pytest.mark.parametrize("options", [{"local_steps": 3, "batch_size": 20}, {}])
def test_memory_of_a_round_follows_the_rows(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """50,000 rows beside 100 clients of two: padded to the longest they would be 5 million rows."""
    for limit in ("PADDING_BYTES", "CHUNK_BYTES"):  # of a federation twenty times larger
        monkeypatch.setattr(f"hierfl.engine.federation.{limit}", 1 << 20)
    data = ragged(50_000, 100)
    run = federate(fedsvi(logistic, **options), data)
    with Allocated() as tensors:
        one_round(run, begin(run), 3)
    assert tensors.peak < 500 * data.num_rows, f"{tensors.peak / data.num_rows:.0f} bytes a row"


def test_predictions_follow_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages over a few draws at a time are those over all draws."""
    data = ragged(20_000, 16)
    fitted = hierfl.fit(fedsvi(logistic), data, rounds=1, settings=hierfl.Settings(compile=False))
    whole = fitted.predict(data, draws=10)
    for module in ("prediction", "client_loop"):
        monkeypatch.setattr(f"hierfl.posterior.{module}.MOST_NUMBERS", 3 * 20_000)
    monkeypatch.setattr("hierfl.posterior.client_loop.PADDING", 100)
    with Allocated() as tensors:
        parts = fitted.predict(data, draws=10)
    assert tensors.peak < 2000 * data.num_rows, f"{tensors.peak / data.num_rows:.0f} bytes a row"
    for name in ("mean", "sd", "log_score", "noise"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-9, atol=1e-9)
    assert torch.equal(parts.known()[0], data.fields["ill"])


def test_chunks_are_cut_where_padding_would_fill_them() -> None:
    counts = torch.tensor([2, 2, 1000, 2, 2, 2, 900, 950])
    ids = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])
    cut = partial(cut_ragged, [ids], counts, few=8, padding=100)
    assert [part.tolist() for part in cut(most=4)] == [[7, 6], [5, 4, 3], [2], [1, 0]]
    assert [part.tolist() for part in cut(most=2)] == [[7, 6], [5, 4], [3], [2], [1, 0]]
    assert cut_ragged([ids], counts, most=4, padding=10_000)[0] is ids, "as they were"


def test_one_batch_of_mostly_padding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check_padded.__globals__, "ONE_BATCH", 1 << 20)
    data = ragged(5_000, 60)
    with pytest.raises(ValueError, match="one batch of 61 clients is padded to the longest, 5000"):
        hierfl.fit_pooled(fedsvi(logistic), data, rounds=1)


def test_ten_thousand_clients_are_fitted_and_predicted() -> None:
    data = many(10_000)
    method = fedsvi(logistic, guides.mean_field)
    eager = hierfl.Settings(compile=False)
    fitted = hierfl.fit(method, data, rounds=2, cohort=0.01, settings=eager)
    assert set(fitted.history["clients"]) == {COHORT}
    assert fitted.predict(data.select(["17", "9999"]), draws=3).mean.shape == (2 * ROWS,)
