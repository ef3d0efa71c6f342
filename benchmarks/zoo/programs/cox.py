"""Leukemia in six hospitals: counting processes with gamma increments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume I, Leuk"
IDIOM = "a baseline hazard as a global vector, risk sets by columns"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(124)
    client, x = np.repeat(np.arange(6), 14), np.tile([0.5, -0.5], 42)
    t = rng.exponential(size=84) / (0.08 * np.exp(1.2 * x + 0.4 * rng.standard_normal(6)[client]))
    end = rng.uniform(5, 35, 84)
    time, event = np.minimum(t, end), t <= end
    cuts = np.linspace(0, 35, 13)
    at_risk = np.clip(time[:, None] - cuts[:-1], 0, np.diff(cuts)) / np.diff(cuts)
    failed = event[:, None] & (time[:, None] > cuts[:-1]) & (time[:, None] <= cuts[1:])
    return {"client": client, "x": x, "risk": at_risk, "failed": failed.astype(float)}


def model(batch: Any) -> None:
    """Increments of the cumulative hazard about r dt."""
    beta = pyro.sample("beta", dist.Normal(0.0, 1000.0))
    increments = pyro.sample("increments", dist.Gamma(0.3 * torch.ones(12), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.Gamma(0.5, 0.2))
    with batch.clients():
        b = pyro.sample("b", dist.Normal(0.0, tau**-0.5))
        with batch.data():
            rate = torch.exp(beta * batch.x + b)[..., None] * batch.risk * increments
            pyro.sample("failed", dist.Poisson(rate + 1e-12).to_event(1), obs=batch.failed)
