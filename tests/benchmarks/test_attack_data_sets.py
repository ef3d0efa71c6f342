"""Strange data sets are taken rightly or refused by name; the counting notices what is neither."""

import numpy as np
import pytest
import torch

from benchmarks.attacks.data_set_cases import Case, same, table_of
from benchmarks.attacks.data_sets import DATA, attack, outcome
from hierfl import ClientData


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_data_set_is_wrong_or_raw(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    found = attack(n=25, seed=1)
    assert found["tried"] == found["right"] + found["refused"] == 25
    assert found["wrong"] == found["raw"] == 0
    assert min(found["right"], found["refused"]) >= 5


@pytest.mark.parametrize("kind", DATA, ids=lambda kind: str(kind.__name__))
def test_every_kind_of_data_set(kind: object) -> None:
    assert callable(kind)
    rng = np.random.Generator(np.random.Philox(5))
    for _ in range(30):
        assert outcome(kind(table_of(rng), rng)) in ("right", "refused")


def test_what_is_neither_is_counted() -> None:
    """The attack has power: rows of another client are wrong, and foreign or nameless errors are
    raw.
    """
    rng = np.random.Generator(np.random.Philox(0))
    t = table_of(rng)

    def turned() -> ClientData:
        return ClientData.from_arrays(t.ids, y=t.y[::-1])

    assert outcome(Case(turned, ("'y'",), lambda d: same(d, t.rows(), "y"))) == "wrong"
    assert outcome(Case(turned, ("'y'",))) == "wrong"
    assert outcome(Case(lambda: torch.ones(2) @ torch.ones(3), ("'y'",))) == "raw"
    refused = Case(lambda: ClientData.from_arrays(t.ids, y=1.0), ("'z'",))
    assert outcome(refused) == "raw"  # its message names y
