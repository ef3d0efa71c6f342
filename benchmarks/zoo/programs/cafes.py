"""Waits at 20 cafes, mornings and afternoons: correlated effects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking, m14.1"
IDIOM = "a local vector, LKJ"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(13)
    cov = [[1.0, -0.35], [-0.35, 0.25]]
    ab = np.repeat(rng.multivariate_normal([3.5, -1.0], cov, 20, method="cholesky"), 10, axis=0)
    afternoon = np.tile([0.0, 1.0], 100)
    wait = ab[:, 0] + ab[:, 1] * afternoon + 0.5 * rng.standard_normal(200)
    return {"client": np.repeat(np.arange(20), 10), "afternoon": afternoon, "wait": wait}


def model(batch: Any) -> None:
    """Intercept and slope of each cafe."""
    a = pyro.sample("a", dist.Normal(5.0, 2.0))
    b = pyro.sample("b", dist.Normal(-1.0, 0.5))
    sigma_cafe = pyro.sample("sigma_cafe", dist.Exponential(torch.ones(2)).to_event(1))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    rho = pyro.sample("rho", dist.LKJCholesky(2, 2.0))
    with batch.clients():
        loc, tril = torch.stack([a, b], -1), sigma_cafe[..., None] * rho
        ab = pyro.sample("ab", dist.MultivariateNormal(loc, scale_tril=tril))
        with batch.data():
            mu = ab[..., 0] + ab[..., 1] * batch.afternoon
            pyro.sample("wait", dist.Normal(mu, sigma), obs=batch.wait)
