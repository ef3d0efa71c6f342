"""Neal's funnel of groups with no rows' help: eight schools, centered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "posteriordb, eight_schools_centered"
IDIOM = "a funnel, one row a client"


def rows() -> dict[str, Any]:
    """Return the rows."""
    y = [28.0, 8, -3, 7, -1, 1, 18, 12]
    return {
        "client": np.arange(8),
        "y": np.array(y),
        "se": np.array([15.0, 10, 16, 11, 9, 11, 10, 18]),
    }


def model(batch: Any) -> None:
    """Effects of schools."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(theta, batch.se), obs=batch.y)
