"""IFCA and FedHB's mixture: clusters by hand, and planted kinds of clients."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from hierfl import ClientBatch, ClientData
from hierfl.methods import fedhb_mixture, ifca
from hierfl.optimizers import SGD
from tests.programs import fit


def center(batch: ClientBatch) -> None:
    """Rows about one number."""
    mu = pyro.param("mu", torch.zeros(()))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(mu.expand(batch.num_clients, 1), 1.0), obs=batch.y)


def numbers(values: tuple[float, ...], counts: tuple[int, ...]) -> ClientData:
    """Return clients whose rows are all alike."""
    rows = enumerate(zip(values, counts, strict=True))
    return ClientData.from_clients({f"c{k}": {"y": torch.full((n,), v)} for k, (v, n) in rows})


def sets(*values: float) -> list[dict[str, Tensor]]:
    return [{"mu": torch.tensor(v)} for v in values]


EXACT: dict[str, Any] = {"optimizer": SGD(1.0), "steps": 1, "batch_size": None, "weights": "rows"}


def test_an_exact_fit_by_rows_is_k_means() -> None:
    """The oracle: clusters (0, 0, 0, 1, 1), centers .0166667 and 5.225 after one round, and they stay."""
    data = numbers((0.0, 0.2, -0.1, 5.0, 5.3), (10, 20, 30, 10, 30))
    method = ifca(center, clusters=2, starts=sets(1.0, 3.0), **EXACT)
    for rounds in (1, 4):
        fitted = fit(method, data, rounds=rounds)
        assert fitted.progress.table.argmax(1).tolist() == [0, 0, 0, 1, 1]
        assert fitted.message["theta"]["mu"].tolist() == pytest.approx([1.0 / 60.0, 5.225])


def test_a_cluster_that_nobody_chooses_stays_and_another_start_finds_it() -> None:
    data = numbers((0.0, 0.2, 5.0), (10, 20, 30))
    lost = fit(ifca(center, clusters=2, starts=sets(2.0, 90.0), **EXACT), data, rounds=3)
    assert lost.message["theta"]["mu"].tolist() == pytest.approx([154.0 / 60.0, 90.0])
    assert lost.message["share"].tolist() == [1.0, 0.0]


def test_clients_and_networks_are_each_other_s_best() -> None:
    """One number each: w_k = (n y_k + r / s^2) / (n + 1 / s^2), r = sum w / (s^2 + 2), s^2 = 0.1.

    Both kinds are 5 apart, so that shares are 0 or 1: two linear equations for each kind.
    """
    data = numbers((-2.0, -1.8, 3.0, 3.2), (10, 10, 10, 10))
    how: dict[str, Any] = {"optimizer": SGD(0.4), "steps": 20, "batch_size": None}
    method = fedhb_mixture(center, spread=0.1**0.5, starts=sets(-1.5, 2.5), **how)
    fitted = fit(method, data, rounds=8)
    for j, ys in enumerate(((-2.0, -1.8), (3.0, 3.2))):
        # w = (10 y + 10 r) / 20, and 2.1 r = sum w = sum(y) / 2 + r
        r = sum(ys) / 2.0 / 1.1
        assert float(fitted.message["theta"]["mu"][j]) == pytest.approx(r, abs=1e-3)
        own = fitted.progress.table.w["mu"].flatten()[2 * j : 2 * j + 2].tolist()
        assert own == pytest.approx([(y + r) / 2.0 for y in ys], abs=1e-3)
    assert fitted.progress.table.share.round().argmax(1).tolist() == [0, 0, 1, 1]


def test_shares_are_soft_where_networks_are_close() -> None:
    """m = 0.1 between 0 and 1 with s^2 = 1: log odds -(0.01 - 0.81) / 2 = 0.4."""
    data = numbers((0.1, 0.1), (4, 4))
    method = fedhb_mixture(center, spread=1.0, optimizer=SGD(1e-9), steps=1, starts=sets(0.1, 1.0))
    fitted = fit(method, data, rounds=1)
    share = torch.tensor([0.0, -0.81 / 2.0]).softmax(0)
    assert fitted.message["share"].tolist() == pytest.approx(share.tolist(), rel=1e-6)
    wanted = [float(2 * c * 0.1 / (1.0 + 2 * c)) for c in share]
    assert fitted.message["theta"]["mu"].tolist() == pytest.approx(wanted, rel=1e-6)
