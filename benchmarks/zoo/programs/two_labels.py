"""Kinds of schools, and pupils who guess."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "Pyro's tutorial on enumeration, plates and dependencies"
IDIOM = "labels of clients and rows, nested"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(72)
    kind = np.array([0, 1, 0, 1, 1, 0, 0, 1])
    client = np.repeat(np.arange(8), 15)
    lazy = rng.random(120) < np.where(kind, 0.15, 0.5)[client]
    return {"client": client, "y": np.where(lazy, -1.0, 1.5) + 0.6 * rng.standard_normal(120)}


def model(batch: Any) -> None:
    """A pupil's label depends on the kind of the school."""
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    low = pyro.sample("low", dist.Beta(2.0, 6.0))
    step = pyro.sample("step", dist.Beta(2.0, 2.0))
    mu = pyro.sample("mu", dist.Normal(-1.0, 1.0))
    gap = pyro.sample("gap", dist.HalfNormal(3.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        kind = pyro.sample("kind", dist.Bernoulli(p), infer={"enumerate": "parallel"})
        chance = low + (1.0 - low) * step * kind
        with batch.data():
            works = pyro.sample("works", dist.Bernoulli(chance), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(mu + gap * works, sigma), obs=batch.y)
