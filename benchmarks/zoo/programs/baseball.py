"""Hits of 18 players: partial pooling by a Beta distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "Pyro and NumPyro, baseball"
IDIOM = "local Beta sites, a Pareto prior"
LOGS = (
    "kappa",
)  # counts bound its likelihood from below, so that it has the prior's tail: no variance


def rows() -> dict[str, Any]:
    """Return the rows."""
    hits = [18.0, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7]
    return {"client": np.arange(18), "hits": np.array(hits)}


def model(batch: Any) -> None:
    """Chances of a hit in 45 at-bats, with a mean and a concentration."""
    m = pyro.sample("m", dist.Uniform(0.0, 1.0))
    kappa = pyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with batch.clients():
        phi = pyro.sample("phi", dist.Beta(m * kappa, (1.0 - m) * kappa))
        with batch.data():
            pyro.sample("hits", dist.Binomial(45.0, phi), obs=batch.hits)
