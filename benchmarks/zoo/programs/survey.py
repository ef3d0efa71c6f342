"""Opinions in ten states, weighted by a survey's design."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
from pyro import poutine

SOURCE = "Pyro's documentation of poutine.scale; Gelman's notes on survey weights"
IDIOM = "poutine.scale"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(39)
    client, w = np.repeat(np.arange(10), 25), rng.gamma(4.0, 0.25, 250)
    y = rng.random(250) < 1 / (1 + np.exp(-0.7 * rng.standard_normal(10)[client]))
    return {"client": client, "w": w, "y": y.astype(float)}


def model(batch: Any) -> None:
    """A row counts by its weight."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.5))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        state = pyro.sample("state", dist.Normal(mu, tau))
        with batch.data(), poutine.scale(scale=batch.w):
            pyro.sample("y", dist.Bernoulli(logits=state), obs=batch.y)
