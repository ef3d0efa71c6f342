"""Four tests of 150 pupils in ten schools, and one factor of each pupil."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "blavaan's pages on two-level factor analysis"
IDIOM = "a factor a row, about a local mean"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(8)
    client = np.repeat(np.arange(10), 15)
    factor = rng.normal(0, 0.5, 10)[client] + rng.standard_normal(150)
    loads = np.array([1.0, 0.8, 1.2, 0.6])
    return {"client": client, "y": factor[:, None] * loads + 0.7 * rng.standard_normal((150, 4))}


def model(batch: Any) -> None:
    """The first load is 1."""
    loads = pyro.sample("loads", dist.LogNormal(torch.zeros(3), 0.5).to_event(1))
    level = pyro.sample("level", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    noise = pyro.sample("noise", dist.HalfNormal(torch.ones(4)).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    loads = torch.cat([torch.ones(1), loads])
    with batch.clients():
        school = pyro.sample("school", dist.Normal(0.0, tau))
        with batch.data():
            pupil = pyro.sample("pupil", dist.Normal(school, sigma))
            loc = level + pupil[..., None] * loads
            pyro.sample("y", dist.Normal(loc, noise).to_event(1), obs=batch.y)
