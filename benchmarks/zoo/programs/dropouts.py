"""Scores of pupils at five visits of twelve schools; those after a dropout are masked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
from pyro import poutine

SOURCE = "Pyro's documentation of poutine.mask"
IDIOM = "poutine.mask"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(38)
    client, t = np.repeat(np.arange(12), 15), np.tile(np.arange(5.0), 36)
    y = 1.0 + 0.3 * t + rng.normal(0, 0.5, 12)[client] + 0.7 * rng.standard_normal(180)
    seen = rng.random(180) < 0.8
    return {"client": client, "t": t, "y": np.where(seen, y, -99.0), "seen": seen}


def model(batch: Any) -> None:
    """What is masked has no likelihood."""
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        level = pyro.sample("level", dist.Normal(0.0, tau))
        with batch.data(), poutine.mask(mask=batch.seen):
            pyro.sample("y", dist.Normal(a + level + b * batch.t, sigma), obs=batch.y)
