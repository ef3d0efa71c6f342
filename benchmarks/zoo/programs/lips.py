"""Lip cancer in 30 districts: neighbors by an intrinsic autoregression."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume I and GeoBUGS, Scotland"
IDIOM = "a global factor of neighbors, one row a client"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(75)
    area = np.arange(30)
    phi = np.cumsum(rng.normal(0, 0.3, 30))
    x, expected = rng.uniform(0, 2, 30), rng.gamma(3.0, 3.0, 30)
    y = rng.poisson(expected * np.exp(-0.3 + 0.3 * x + phi - phi.mean()))
    return {"client": area, "area": area, "x": x, "e": expected, "y": y.astype(float)}


def model(batch: Any) -> None:
    """Differences of neighbors are Normal, and their sum is soft."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    phi = pyro.sample("phi", dist.Normal(torch.zeros(30), 10.0).to_event(1))
    pyro.factor("neighbors", dist.Normal(0.0, 1.0).log_prob(phi[1:] - phi[:-1]).sum())
    pyro.factor("sum", dist.Normal(0.0, 0.3).log_prob(phi.sum()))
    with batch.clients(), batch.data():
        rate = batch.e * torch.exp(alpha + beta * batch.x + sigma * phi[batch.area])
        pyro.sample("y", dist.Poisson(rate), obs=batch.y)
