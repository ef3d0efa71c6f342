"""A walk of each of six series, by scaled steps and cumsum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "NumPyro, stochastic volatility and GaussianRandomWalk"
IDIOM = "a local walk, rows pick entries"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(15)
    walk = 0.3 * rng.standard_normal((6, 12)).cumsum(1)
    y = rng.poisson(np.exp(1.0 + walk)).astype(float)
    return {"client": np.repeat(np.arange(6), 12), "t": np.tile(np.arange(12), 6), "y": y.ravel()}


def model(batch: Any) -> None:
    """Counts whose log mean is a walk."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        step = pyro.sample("step", dist.Normal(torch.zeros(12), 1.0).to_event(1))
        walk = tau * torch.cumsum(step, -1)
        with batch.data():
            own = (walk * torch.nn.functional.one_hot(batch.t, 12)).sum(-1)
            pyro.sample("y", dist.Poisson(torch.exp(mu + own)), obs=batch.y)
