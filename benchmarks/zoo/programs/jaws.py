"""Jaws of 20 boys at four ages: a joint Normal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume II, Jaws"
IDIOM = "no local site, LKJ"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(7)
    cov = np.full((4, 4), 5.6) + 0.7 * np.eye(4)
    y = np.array([48.6, 49.6, 50.6, 51.4]) + rng.multivariate_normal(
        np.zeros(4), cov, 20, method="cholesky"
    )
    return {"client": np.arange(20) % 5, "y": y.round(1) - 50.0}


def model(batch: Any) -> None:
    """A line of means, and a covariance of four ages."""
    beta0 = pyro.sample("beta0", dist.Normal(0.0, 30.0))
    beta1 = pyro.sample("beta1", dist.Normal(0.0, 30.0))
    scale = pyro.sample("scale", dist.HalfCauchy(2.5 * torch.ones(4)).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(4, 1.0))
    tril = scale[..., None] * corr
    with batch.clients(), batch.data():
        loc = beta0 + beta1 * (torch.arange(4) / 2 + 8.0 - 8.75)
        pyro.sample("y", dist.MultivariateNormal(loc, scale_tril=tril), obs=batch.y)
