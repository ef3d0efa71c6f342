"""Radon in houses of 30 counties, whose uranium is known, with a level and a noise scale of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "posteriordb, radon with a county's own scale"
IDIOM = "a noise scale of each client, a covariate of clients"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(11)
    houses = rng.integers(2, 20, 30)
    client = np.repeat(np.arange(30), houses)
    floor = (rng.random(len(client)) < 0.2).astype(float)
    uranium, level = 0.4 * rng.standard_normal(30), 0.15 * rng.standard_normal(30)
    scale = np.exp(-0.4 + 0.3 * rng.standard_normal(30))
    mean = 1.4 + (0.7 * uranium + level)[client] - 0.6 * floor
    y = mean + scale[client] * rng.standard_normal(len(client))
    return {"client": client, "floor": floor, "uranium": uranium[client], "y": y}


def model(batch: Any) -> None:
    """Log scales are Normal about a common one."""
    g = pyro.sample("g", dist.Normal(torch.zeros(2), 10.0).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    log_scale = pyro.sample("log_scale", dist.Normal(0.0, 1.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(g[0], tau))
        sigma = pyro.sample("sigma", dist.LogNormal(log_scale, spread))
        with batch.data():
            mean = a + g[1] * batch.uranium + b * batch.floor
            pyro.sample("y", dist.Normal(mean, sigma), obs=batch.y)
