"""Counts whose program observes nothing until poutine conditions it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine

SOURCE = "Pyro's tutorials, poutine.condition"
IDIOM = "poutine.condition inside of the model"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(63)
    client = np.repeat(np.arange(12), 6)
    x, level = rng.standard_normal(72), 0.5 + 0.5 * rng.standard_normal(12)[client]
    return {"client": client, "x": x, "y": rng.poisson(np.exp(level + 0.3 * x)).astype(float)}


def unconditioned(batch: Any) -> None:
    """Sample counts."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Poisson(torch.exp(theta + b * batch.x)))


def model(batch: Any) -> None:
    """Give the counts."""
    poutine.condition(unconditioned, data={"y": batch.y})(batch)
