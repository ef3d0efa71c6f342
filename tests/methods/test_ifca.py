"""IFCA: k-means where a step is an exact fit, FedAvg with one cluster, planted clusters, empty ones."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.methods import ifca
from hierfl.optimizers import SGD
from tests.programs import fit


def center(batch: ClientBatch) -> None:
    """Rows about one number."""
    mu = pyro.param("mu", torch.zeros(()))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(mu.expand(batch.num_clients, 1), 1.0), obs=batch.y)


def numbers(values: tuple[float, ...], counts: tuple[int, ...]) -> ClientData:
    """Return clients whose rows are all alike."""
    return ClientData.from_clients(
        {
            f"c{k}": {"y": torch.full((n,), v)}
            for k, (v, n) in enumerate(zip(values, counts, strict=True))
        }
    )


def sets(*values: float) -> list[dict[str, Tensor]]:
    return [{"mu": torch.tensor(v)} for v in values]


EXACT: dict[str, Any] = {"optimizer": SGD(1.0), "steps": 1, "batch_size": None, "weights": "rows"}


def test_an_exact_fit_by_rows_is_k_means() -> None:
    """The oracle: clusters (0, 0, 0, 1, 1), centers .0166667 and 5.225 after one round, and they stay."""
    data = numbers((0.0, 0.2, -0.1, 5.0, 5.3), (10, 20, 30, 10, 30))
    method = ifca(center, clusters=2, starts=sets(1.0, 3.0), **EXACT)
    for rounds in (1, 4):
        fitted = fit(method, data, rounds=rounds)
        assert fitted.progress.table["share"].argmax(1).tolist() == [0, 0, 0, 1, 1]
        assert fitted.message["theta"]["mu"].tolist() == pytest.approx([1.0 / 60.0, 5.225])


def test_a_cluster_that_nobody_chooses_stays_and_another_start_finds_it() -> None:
    data = numbers((0.0, 0.2, 5.0), (10, 20, 30))
    lost = fit(ifca(center, clusters=2, starts=sets(2.0, 90.0), **EXACT), data, rounds=3)
    assert lost.message["theta"]["mu"].tolist() == pytest.approx([154.0 / 60.0, 90.0])
    assert lost.message["share"].tolist() == [1.0, 0.0]
