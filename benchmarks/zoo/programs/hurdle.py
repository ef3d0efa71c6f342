"""Counts that first pass a hurdle: whether there are any, then how many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "brms, hurdle_poisson"
IDIOM = "a factor of two linear predictors, a local vector"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(6)
    N, n = 15, 20
    c = np.repeat(np.arange(N), n)
    x = rng.normal(size=N * n)
    p = 1 / (1 + np.exp(-(rng.normal(0.3, 0.7, N)[c])))
    lam = np.exp(rng.normal(0.5, 0.4, N)[c] + 0.4 * x)
    y = np.where(rng.random(N * n) < p, np.maximum(1, rng.poisson(lam)), 0).astype(float)
    return {"client": c, "x": x, "y": y}


def model(batch: Any) -> None:
    """Whether a count passes 0, and its truncated Poisson distribution."""
    mp = pyro.sample("mp", dist.Normal(0.0, 1.5))
    ml = pyro.sample("ml", dist.Normal(0.0, 1.5))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    sds = pyro.sample("sds", dist.HalfNormal(torch.ones(2)).to_event(1))
    with batch.clients():
        u = pyro.sample("u", dist.Normal(torch.stack([mp, ml]), sds).to_event(1))
        with batch.data():
            lam = torch.exp(u[..., 1] + b * batch.x)
            ll = dist.Poisson(lam).log_prob(batch.y) - torch.log(-torch.expm1(-lam))
            softplus = torch.nn.functional.softplus
            passed = ll - softplus(-u[..., 0])
            pyro.factor("hurdle", torch.where(batch.y > 0, passed, -softplus(u[..., 0])))
