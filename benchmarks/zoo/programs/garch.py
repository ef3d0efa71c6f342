"""Volatility that follows its own past: a mean of each series."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "posteriordb, garch11"
IDIOM = "a loop over steps in columns, scales that follow residuals"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(1)
    N, T = 8, 60
    mu = rng.normal(0.1, 0.3, N)
    y = np.zeros((N, T))
    for n in range(N):
        s2 = 1.0
        e = 0
        for t in range(T):
            s2 = 0.3 + 0.3 * e**2 + 0.4 * s2 if t else 1.0
            e = np.sqrt(s2) * rng.normal()
            y[n, t] = mu[n] + e
    return {"client": np.arange(N), "y": y}


def model(batch: Any) -> None:
    """Variances follow the square of the last residual, and themselves."""
    a0 = pyro.sample("a0", dist.HalfNormal(1.0))
    a1 = pyro.sample("a1", dist.Uniform(0.0, 1.0))
    b1 = pyro.sample("b1", dist.Beta(2.0, 2.0))
    m = pyro.sample("m", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(m, tau))
        with batch.data():
            y = batch.y
            s2 = torch.ones_like(y[..., 0])
            out = []
            for t in range(y.shape[-1]):
                if t:
                    s2 = a0 + a1 * (y[..., t - 1] - mu) ** 2 + b1 * (1 - a1) * s2
                out.append(s2)
            scale = torch.stack(out, -1).sqrt()
            pyro.sample("obs", dist.Normal(mu[..., None], scale).to_event(1), obs=y)
