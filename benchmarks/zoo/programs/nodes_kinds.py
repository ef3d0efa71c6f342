"""Two kinds of clinics: a mixture of clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "Pyro's tutorial on enumeration; NumPyro, mixtures of groups"
IDIOM = "kinds of clients"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(23)
    kind = np.array([0, 0, 0, 1, 1, 0, 1, 0, 0, 1])
    client = np.repeat(np.arange(10), 8)
    y = np.where(kind, 1.5, 0.0)[client] + rng.standard_normal(80)
    return {"client": client, "y": y}


def model(batch: Any) -> None:
    """Means of kinds, ordered by a positive step."""
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    low = pyro.sample("low", dist.Normal(0.0, 2.0))
    step = pyro.sample("step", dist.HalfNormal(2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with batch.clients():
        kind = pyro.sample("kind", dist.Bernoulli(p))
        with batch.data():
            pyro.sample("y", dist.Normal(low + step * kind, sigma), obs=batch.y)
