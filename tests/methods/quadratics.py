"""Fixture Q3 of methods_baselines.md: three clients with quadratic losses.

The mean negative log likelihood of client k is (w - b_k)' H_k (w - b_k) / 2, up to a constant.
"""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl import ClientBatch, ClientData, Fit

H = torch.tensor(
    [[[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.5], [0.5, 1.0]], [[0.5, 0.0], [0.0, 3.0]]],
    dtype=torch.float64,
)
B = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]], dtype=torch.float64)
P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
UNIFORM = torch.full((3,), 1.0 / 3.0, dtype=torch.float64)
START = torch.tensor([3.0, -2.0], dtype=torch.float64)
I2 = torch.eye(2, dtype=torch.float64)
ALL_ROWS: dict[str, Any] = {"unit": "step", "batch_size": None}
ONE_STEP: dict[str, Any] = {**ALL_ROWS, "steps": 1}


def clients(curves: Tensor = H) -> ClientData:
    """Return three clients of 5, 3 and 2 equal rows.

    Each row of client k holds the factor R and the label R b, with R'R = H, so that half of the
    squared norm of R w - R b is the client's quadratic.
    """
    roots = torch.linalg.cholesky(curves).mT
    rows = {}
    for k, n in enumerate((5, 3, 2)):
        rows["abc"[k]] = {"factor": roots[k].expand(n, 2, 2), "y": (roots[k] @ B[k]).expand(n, 2)}
    return ClientData.from_clients(rows)


def equal_rows() -> ClientData:
    """Return the quadratic clients with four rows each."""
    data = clients()
    return ClientData.from_clients(
        {
            k: {n: v[:1].expand(4, *v.shape[1:]) for n, v in data.select([k]).fields.items()}
            for k in "abc"
        }
    )


def at(start: Tensor, *, personal: bool = False):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Return a model whose param theta starts at `start`.

    The rows depend on theta directly, or on w_k ~ Normal(theta, 1) where `personal` is true.
    """

    def model(batch: ClientBatch) -> None:
        w = theta = pyro.param("theta", start.clone())
        with batch.clients():
            if personal:
                w = pyro.sample("w", dist.Normal(theta, 1.0).to_event(1))
            else:
                w = theta.expand(batch.num_clients, 1, 2)
            observed(batch, w)

    return model


def observed(batch: ClientBatch, w: Tensor) -> None:
    """Observe the rows of clients at weights w, (clients, 1, 2)."""
    with batch.data():
        loc = (batch.factor @ w[..., None])[..., 0]
        pyro.sample("y", dist.Normal(loc, 1.0).to_event(1), obs=batch.y)


def stationary(weights: Tensor) -> Tensor:
    """Return S(W), the w that solves sum_k W_k (w - b_k) = 0, for weights of shape (3, 2, 2)."""
    return torch.linalg.solve(weights.sum(0), (weights @ B[..., None]).sum(0))[:, 0]


def theta(fitted: Fit) -> Tensor:
    """Return the global weights of a fit."""
    value: Tensor = fitted.message["theta"]
    return value
