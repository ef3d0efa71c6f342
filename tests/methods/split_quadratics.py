"""Fixture Q3c of methods_baselines.md: quadratics of two params, of which v is each client's own and u common."""

from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl import ClientBatch
from tests.methods import quadratics
from tests.methods.quadratics import B

HC = torch.tensor(
    [[[1.0, 0.3], [0.3, 2.0]], [[2.0, 0.5], [0.5, 1.0]], [[0.5, -0.2], [-0.2, 3.0]]],
    dtype=torch.float64,
)
EVERY_ROW: dict[str, Any] = {"batch_size": None, "unit": "step"}


clients = partial(quadratics.clients, HC)


def at(u: float = 0.0, v: float = 0.0, *, plate: bool = False):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Return a model of w = (u, v); v is declared inside the clients plate where `plate` is true."""

    def model(batch: ClientBatch) -> None:
        n = batch.num_clients
        common = pyro.param("u", torch.tensor([u]))
        own = None if plate else pyro.param("v", torch.tensor([v])).expand(n, 1, 1)
        with batch.clients():
            if own is None:
                own = pyro.param("v", torch.full((n, 1, 1), v))
            w = torch.cat([common.expand(n, 1, 1), own], -1)
            with batch.data():
                loc = (batch.factor @ w[..., None])[..., 0]
                pyro.sample("y", dist.Normal(loc, 1.0).to_event(1), obs=batch.y)

    return model


def best_v(u: Tensor) -> Tensor:
    """Return each client's best v given u, (3,)."""
    return B[:, 1] - HC[:, 0, 1] / HC[:, 1, 1] * (u - B[:, 0])


def profile() -> Tensor:
    """Return the curvature of each client's loss in u where v is at its best, (3,)."""
    return HC[:, 0, 0] - HC[:, 0, 1].square() / HC[:, 1, 1]
