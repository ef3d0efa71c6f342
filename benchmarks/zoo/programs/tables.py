"""Effects of pairs of two factors, beside those of ten groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "Stan user's guide, multilevel regression with interactions"
IDIOM = "a crossed table of two plates outside the clients"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(21)
    client = rng.integers(0, 10, 200)
    a, b = rng.integers(0, 3, 200), rng.integers(0, 4, 200)
    table = 0.7 * rng.normal(size=(3, 4))
    y = table[a, b] + 0.5 * rng.normal(size=10)[client] + 0.6 * rng.normal(size=200)
    return {"client": client, "a": a, "b": b, "y": y}


def model(batch: Any) -> None:
    """Each row picks its entry by two codes."""
    s = pyro.sample("s", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("as", 3, dim=-2), pyro.plate("bs", 4, dim=-1):
        table = pyro.sample("table", dist.Normal(mu, s))
    with batch.clients():
        u = pyro.sample("u", dist.Normal(0.0, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(table[batch.a, batch.b] + u, sigma), obs=batch.y)
