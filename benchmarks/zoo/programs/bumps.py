"""A Gaussian process of counts for each of six series."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "posteriordb, gp_pois_regr"
IDIOM = "a Gaussian process of each client, its kernel in common"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(36)
    x = np.linspace(-2.0, 2.0, 11)
    kernel = np.exp(-0.5 * (x[:, None] - x) ** 2 / 0.64) + 1e-6 * np.eye(11)
    curves = rng.multivariate_normal(np.zeros(11), kernel, 6)
    return {"client": np.arange(6), "k": rng.poisson(np.exp(1.0 + 0.8 * curves)).astype(float)}


def model(batch: Any) -> None:
    """Counts whose log rate is a smooth curve."""
    length = pyro.sample("length", dist.Gamma(25.0, 20.0))
    height = pyro.sample("height", dist.HalfNormal(2.0))
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    x = torch.linspace(-2.0, 2.0, 11)
    away = (x[:, None] - x) / length[..., None, None]
    kernel = height[..., None, None] ** 2 * torch.exp(-0.5 * away**2)
    root = torch.linalg.cholesky(kernel + 1e-5 * torch.eye(11))
    with batch.clients():
        z = pyro.sample("z", dist.Normal(torch.zeros(11), 1.0).to_event(1))
        curve = (root @ z[..., None])[..., 0]
        with batch.data():
            pyro.sample("k", dist.Poisson(torch.exp(mean + curve)).to_event(1), obs=batch.k)
