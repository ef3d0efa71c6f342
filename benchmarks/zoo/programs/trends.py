"""Trends with changes and a season in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Prophet, trend changes with Laplace priors"
IDIOM = "local Laplace sites, basis functions"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(10)
    N, T = 8, 48
    c = np.repeat(np.arange(N), T)
    t = np.tile(np.arange(T) / T, N)
    k = rng.normal(1, 0.5, N)[c]
    y = (
        k * t
        + 0.5 * np.sin(2 * np.pi * 4 * t)
        + 0.3 * np.cos(2 * np.pi * 4 * t)
        + np.maximum(t - 0.5, 0) * rng.laplace(0, 1, N)[c]
        + 0.2 * rng.normal(size=N * T)
    )
    return {"client": c, "t": t, "y": y}


def model(batch: Any) -> None:
    """A slope and its changes at three dates, with a season of all clients."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    mk = pyro.sample("mk", dist.Normal(0.0, 2.0))
    sk = pyro.sample("sk", dist.HalfNormal(1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
    s = torch.tensor([0.25, 0.5, 0.75])
    with batch.clients():
        k = pyro.sample("k", dist.Normal(mk, sk))
        delta = pyro.sample("delta", dist.Laplace(torch.zeros(3), tau).to_event(1))
        with batch.data():
            bend = (torch.maximum(batch.t[..., None] - s, torch.zeros(3)) * delta).sum(-1)
            season = beta[0] * torch.sin(8 * np.pi * batch.t) + beta[1] * torch.cos(
                8 * np.pi * batch.t
            )
            pyro.sample("y", dist.Normal(k * batch.t + bend + season, sigma), obs=batch.y)
