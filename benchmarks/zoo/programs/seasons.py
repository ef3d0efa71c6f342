"""Levels of eight series by scaled innovations, with seasons in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Pyro, forecasting tutorials; Stan, structural time series"
IDIOM = "innovations scaled by a global site, cumsum in columns"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(12)
    level = 0.2 * rng.standard_normal((8, 24)).cumsum(1) + rng.standard_normal((8, 1))
    season = np.array([0.5, -0.2, 0.1, -0.4])[np.arange(24) % 4]
    return {"client": np.arange(8), "y": level + season + 0.3 * rng.standard_normal((8, 24))}


def model(batch: Any) -> None:
    """A level that moves, four seasons whose sum is 0, and noise."""
    season = pyro.sample("season", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    move = pyro.sample("move", dist.HalfNormal(0.5))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    spread = pyro.sample("spread", dist.HalfNormal(2.0))
    with batch.clients():
        start = pyro.sample("start", dist.Normal(mean, spread))
        step = pyro.sample("step", dist.Normal(torch.zeros(23), 1.0).to_event(1))
        with batch.data():
            later = start[..., None] + move * step.cumsum(-1)
            level = torch.cat([start[..., None], later], -1)
            whole = torch.cat([season, -season.sum(-1)[..., None]], -1)
            pyro.sample("y", dist.Normal(level + whole.repeat(6), noise).to_event(1), obs=batch.y)
