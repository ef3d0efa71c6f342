"""Weights of 30 rats: correlated lines, by LKJ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume II, Birats"
IDIOM = "a local vector, LKJ"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(8)
    x = np.tile([8.0, 15, 22, 29, 36], 30)
    cov = [[200.0, 4.0], [4.0, 0.3]]
    ab = np.repeat(rng.multivariate_normal([106.0, 6.2], cov, 30, method="cholesky"), 5, axis=0)
    y = ab[:, 0] + ab[:, 1] * x + rng.normal(0, 6, 150)
    return {"client": np.repeat(np.arange(30), 5), "x": x, "y": y.round()}


def model(batch: Any) -> None:
    """Intercept and slope of each rat, jointly Normal."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 1000.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfCauchy(10.0 * torch.ones(2)).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(2, 1.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(10.0))
    tril = tau[..., None] * corr
    with batch.clients():
        beta = pyro.sample("beta", dist.MultivariateNormal(mu, scale_tril=tril))
        with batch.data():
            loc = beta[..., 0] + beta[..., 1] * batch.x
            pyro.sample("y", dist.Normal(loc, sigma), obs=batch.y)
