"""Tools of ten societies, related by distance: a Gaussian process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking, m14.8"
IDIOM = "a global Gaussian process, one row a client"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(69)
    place, pop = np.linspace(0, 5, 10), rng.normal(9.0, 1.5, 10)
    d2 = (place[:, None] - place) ** 2
    k = np.linalg.cholesky(0.3 * np.exp(-0.5 * d2) + 0.01 * np.eye(10)) @ rng.standard_normal(10)
    y = rng.poisson(1.2 * np.exp(0.27 * pop + k))
    return {"client": np.arange(10), "society": np.arange(10), "log_pop": pop, "y": y.astype(float)}


def model(batch: Any) -> None:
    """Deviations of societies have a covariance that falls with distance."""
    x = torch.linspace(0.0, 5.0, 10)
    etasq = pyro.sample("etasq", dist.Exponential(2.0))
    rhosq = pyro.sample("rhosq", dist.Exponential(0.5))
    a = pyro.sample("a", dist.Exponential(1.0))
    b = pyro.sample("b", dist.Normal(0.2, 0.2))
    distance = (x[:, None] - x[None, :]) ** 2
    covariance = etasq * torch.exp(-rhosq * distance) + 0.01 * torch.eye(10)
    k = pyro.sample("k", dist.MultivariateNormal(torch.zeros(10), covariance))
    with batch.clients(), batch.data():
        rate = a * torch.exp(b * batch.log_pop + k[batch.society])
        pyro.sample("y", dist.Poisson(rate), obs=batch.y)
