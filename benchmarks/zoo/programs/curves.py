"""Eight curves of ten points, each a Gaussian process with noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "posteriordb, gp_regr; Pyro's Gaussian processes"
IDIOM = "a covariance of columns from global sites"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(78)
    x = np.linspace(-1, 1, 10)
    root = np.linalg.cholesky(np.exp(-0.5 * (x[:, None] - x) ** 2 / 0.09) + 1e-6 * np.eye(10))
    y = rng.standard_normal((8, 10)) @ root.T + 0.2 * rng.standard_normal((8, 10))
    return {"client": np.arange(8), "x": np.tile(x, (8, 1)), "y": y}


def model(batch: Any) -> None:
    """Length, variance and noise of a squared exponential kernel."""
    length = pyro.sample("length", dist.InverseGamma(5.0, 2.0))
    variance = pyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    with batch.clients(), batch.data():
        away = (batch.x[..., :, None] - batch.x[..., None, :]) / length
        cov = variance * torch.exp(-0.5 * away**2) + (noise**2 + 1e-5) * torch.eye(10)
        normal = dist.MultivariateNormal(torch.zeros(10), covariance_matrix=cov)
        pyro.sample("y", normal, obs=batch.y)
