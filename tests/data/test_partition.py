"""Partitions are disjoint, complete, without empty clients, reproducible from a seed, and skewed as asked."""

import socket
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hierfl import partition

LABELS = np.random.default_rng(0).integers(0, 10, 3000)
MAKERS: dict[str, Callable[[int], Tensor]] = {
    "pathological": lambda seed: partition.pathological(LABELS, num_clients=10, classes_per_client=2, seed=seed),
    "dirichlet": lambda seed: partition.dirichlet(LABELS, num_clients=5, alpha=0.3, seed=seed),
    "dirichlet_min_rows": lambda seed: partition.dirichlet(LABELS, num_clients=6, alpha=0.3, seed=seed, min_rows=300),
    "class_mixes": lambda seed: partition.class_mixes(LABELS, num_clients=5, alpha=0.01, seed=seed),
    "log_normal": lambda seed: partition.quantity_skew(3000, num_clients=5, sigma=2.0, seed=seed, min_rows=50),
    "label_skew": lambda seed: partition.label_skew(LABELS, num_clients=5, share=0.8, seed=seed),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a partition opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("maker", MAKERS)
def test_rows_have_one_client_and_clients_rows(
    maker: str, global_generator_untouched: None
) -> None:
    state = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002 - to check that nothing draws from it
    for seed in (-1, 2**40):
        ids = MAKERS[maker](seed)
        assert ids.dtype == torch.int64
        assert ids.shape == (3000,)
        assert ids.min() == 0
        counts = torch.bincount(ids)
        assert len(counts) == {"pathological": 10, "dirichlet_min_rows": 6}.get(maker, 5)
        assert counts.min() >= {"dirichlet_min_rows": 300, "log_normal": 50}.get(maker, 1)
    assert np.random.get_state()[1].tolist() == state  # type: ignore[index]  # noqa: NPY002


@pytest.mark.slow("pathological", "dirichlet")
@pytest.mark.parametrize("maker", MAKERS)
def test_the_seed_determines_the_partition(maker: str) -> None:
    first = MAKERS[maker](5)
    torch.manual_seed(123)
    assert torch.equal(first, MAKERS[maker](5))
    assert not torch.equal(first, MAKERS[maker](6))


@pytest.mark.parametrize("classes", [1, 3, 10])
def test_pathological_gives_each_client_the_requested_number_of_classes(classes: int) -> None:
    ids = partition.pathological(LABELS, num_clients=10, classes_per_client=classes, seed=0)
    table = partition.label_table(LABELS, ids)
    assert ((table > 0).sum(1) == classes).all()
    # The clients of a class share it evenly.
    for column in table.T:
        shares = column[column > 0]
        assert len(shares) == 0 or shares.max() - shares.min() <= 1
    assert (ids >= 0).all()


def test_rows_of_classes_without_a_client_are_left_out() -> None:
    ids = partition.pathological(LABELS, num_clients=3, classes_per_client=1, seed=0)
    assert set(LABELS[(ids < 0).numpy()].tolist()) == set(range(3, 10))
    data = partition.to_clients(ids, y=LABELS)
    assert data.names == ("0", "1", "2")
    assert data.num_rows == int((ids >= 0).sum())


@pytest.mark.slow("dirichlet")
@pytest.mark.parametrize("of", [partition.dirichlet, partition.class_mixes])
def test_clients_are_more_alike_with_a_larger_alpha(of: Callable[..., Tensor]) -> None:
    labels = np.tile(LABELS, 4)

    def distance(alpha: float) -> float:
        ids = of(labels, num_clients=8, alpha=alpha, seed=1)
        table = partition.label_table(labels, ids).double()
        return float(
            (table / table.sum(1, keepdim=True) - table.sum(0) / table.sum()).abs().sum(1).mean()
        )

    spread = [distance(alpha) for alpha in (0.1, 3.0, 1000.0)]
    assert spread == sorted(spread, reverse=True)
    assert spread[0] > 1.0
    assert spread[-1] < 0.1


@pytest.mark.parametrize("alpha", [1e-300, 1e-8, 0.01, 1.0, 1e8])
def test_clients_with_mixes_of_their_own_have_equally_many_rows(alpha: float) -> None:
    ids = partition.class_mixes(LABELS, num_clients=7, alpha=alpha, seed=0)
    assert (ids >= 0).all()
    assert sorted(torch.bincount(ids).tolist()) == [428] * 3 + [429] * 4


def test_a_client_s_mix_is_a_draw_of_the_dirichlet_distribution() -> None:
    # The first 500 clients take a quarter of the rows and use no class up. Of L = 10 classes, the
    # expected sum of squared shares is (1 + alpha) / (1 + L alpha).
    labels = np.repeat(np.arange(10), 40_000)
    table = partition.label_table(
        labels, partition.class_mixes(labels, num_clients=2000, alpha=0.5, seed=0)
    )[:500].double()
    shares = table / table.sum(1, keepdim=True)
    assert torch.allclose(shares.mean(0), torch.full((10,), 0.1).double(), atol=0.025)
    assert shares.square().sum(1).mean() == pytest.approx(1.5 / 6.0, abs=0.02)


def test_rows_of_a_class_are_dealt_in_random_order() -> None:
    labels = np.zeros(4000, dtype=int)
    for ids in (
        partition.dirichlet(labels, num_clients=2, alpha=50.0, seed=0),
        partition.pathological(labels, num_clients=2, classes_per_client=1, seed=0),
        partition.class_mixes(labels, num_clients=2, alpha=50.0, seed=0),
        partition.label_skew(labels, num_clients=2, share=1.0, seed=0),
        partition.quantity_skew(4000, num_clients=2, sigma=0.1, seed=0),
    ):
        first, second = ids[:2000].double().mean(), ids[2000:].double().mean()
        assert abs(first - second) < 0.1


def test_sigma_is_the_spread_of_log_sizes() -> None:
    even = torch.bincount(partition.quantity_skew(1003, num_clients=10, sigma=0.0, seed=0))
    assert even.max() - even.min() <= 1
    sizes = torch.bincount(
        partition.quantity_skew(2_000_000, num_clients=2000, sigma=0.7, seed=0)
    ).double()
    # sd of the log over 2,000 clients: 0.7 +- 0.011.
    assert abs(float(sizes.log().std()) - 0.7) < 0.05


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_share_of_each_class_goes_to_its_majority_clients(share: float) -> None:
    labels = np.repeat(np.arange(5), 200)
    table = partition.label_table(
        labels, partition.label_skew(labels, num_clients=10, share=share, seed=0)
    ).double()
    own = table[torch.arange(10), torch.arange(10) % 5] / table.sum(1)
    # A client also gets rows of its majority class from the rest that is dealt to all.
    assert float(own.mean()) == pytest.approx(share + (1.0 - share) / 5, abs=0.02)
    assert table.sum(1).unique().tolist() == [100.0]


def test_label_skew_with_fewer_clients_than_classes_leaves_no_row_out() -> None:
    ids = partition.label_skew(LABELS, num_clients=3, share=1.0, seed=0)
    assert (ids >= 0).all()
    assert len(ids.unique()) == 3


def test_to_clients_agrees_with_the_label_table() -> None:
    ids = MAKERS["dirichlet"](0)
    data = partition.to_clients(ids, y=LABELS, place=np.arange(3000))
    assert data.names == tuple(str(k) for k in range(5))
    assert torch.equal(data.row_client, ids[data.fields["place"]])
    for k, row in enumerate(partition.label_table(LABELS, ids)):
        own = data.select([k]).fields["y"]
        assert torch.equal(torch.bincount(own, minlength=10), row)


def test_labels_may_be_any_integers_in_a_tensor() -> None:
    ids = partition.dirichlet(torch.from_numpy(LABELS), num_clients=3, alpha=0.3, seed=0)
    assert torch.equal(ids, partition.dirichlet(LABELS * 7 - 30, num_clients=3, alpha=0.3, seed=0))


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "too many classes": (
        lambda: partition.pathological(LABELS, num_clients=5, classes_per_client=11, seed=0), ValueError,
        "classes_per_client is 11: it must be in"
    ),
    "a class too small": (
        lambda: partition.pathological([0, 1, 1, 1, 1, 1], num_clients=4, classes_per_client=2, seed=0), ValueError,
        "a class has fewer rows than it has clients"
    ),
    "alpha 0": (lambda: partition.dirichlet(LABELS, num_clients=5, alpha=0.0, seed=0), ValueError, "alpha is 0.0"),
    "alpha nan": (
        lambda: partition.dirichlet(LABELS, num_clients=5, alpha=float("nan"), seed=0), ValueError, "alpha is nan"
    ),
    "alpha of mixes": (
        lambda: partition.class_mixes(LABELS, num_clients=5, alpha=-1.0, seed=0), ValueError, "alpha is -1.0"
    ),
    "mixes of more clients than rows": (
        lambda: partition.class_mixes([0, 1], num_clients=3, alpha=1.0, seed=0), ValueError, "but there are 2"
    ),
    "alpha hopeless": (
        lambda: partition.dirichlet(LABELS, num_clients=300, alpha=0.001, seed=0), ValueError,
        "after eleven draws a client still has fewer than 1 rows"
    ),
    "more clients than rows": (
        lambda: partition.dirichlet([0, 1], num_clients=3, alpha=1.0, seed=0), ValueError,
        "need 3 rows, but there are 2"
    ),
    "min_rows too many": (
        lambda: partition.quantity_skew(10, num_clients=3, sigma=1.0, min_rows=4, seed=0), ValueError, "need 12 rows"
    ),
    "no clients": (
        lambda: partition.quantity_skew(10, num_clients=0, sigma=1.0, seed=0), ValueError, "num_clients is 0"
    ),
    "min_rows 0": (
        lambda: partition.dirichlet(LABELS, num_clients=2, alpha=1.0, min_rows=0, seed=0), ValueError,
        "min_rows is 0"
    ),
    "sigma": (lambda: partition.quantity_skew(9, num_clients=3, sigma=-1.0, seed=0), ValueError, "sigma is -1.0"),
    "alpha": (lambda: partition.dirichlet(LABELS, num_clients=3, alpha=0.0, seed=0), ValueError, "alpha is 0.0"),
    "share": (lambda: partition.label_skew(LABELS, num_clients=3, share=1.1, seed=0), ValueError, "share is 1.1"),
    "nobody's majority": (
        lambda: partition.label_skew([0] * 9 + [1], num_clients=6, share=1.0, seed=0), ValueError,
        "left without rows"
    ),
    "shape": (
        lambda: partition.label_skew([[0], [1]], num_clients=2, share=1.0, seed=0), ValueError, r"shape \(2, 1\)"
    ),
    "floating": (
        lambda: partition.label_skew([0.0, 1.0], num_clients=2, share=1.0, seed=0), TypeError, "type float64: give"
    ),
    "length": (
        lambda: partition.to_clients(torch.tensor([0, 1]), y=[1]), ValueError,
        "field 'y' has 1 rows, but the partition has 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_requests_raise_a_clear_error(case: str) -> None:
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        make()


def test_without_flwr_datasets_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(ImportError, match=r"hierfl\[data\]"):
        MAKERS["dirichlet"](0)
