"""Yield of six batches of dyestuff: variance components."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "BUGS volume I, Dyes"
IDIOM = "vague priors, variance near 0"


def rows() -> dict[str, Any]:
    """Return the rows."""
    y = [1545.0, 1440, 1440, 1520, 1580, 1540, 1555, 1490, 1560, 1495, 1595, 1550, 1605, 1510, 1560]
    y += [1445, 1440, 1595, 1465, 1545, 1595, 1630, 1515, 1635, 1625, 1520, 1455, 1450, 1480, 1445]
    return {"client": np.repeat(np.arange(6), 5), "y": np.array(y)}


def model(batch: Any) -> None:
    """Batches vary, and samples of a batch, in unscaled units."""
    theta = pyro.sample("theta", dist.Normal(1500.0, 1000.0))
    between = pyro.sample("between", dist.HalfCauchy(50.0))
    within = pyro.sample("within", dist.HalfCauchy(50.0))
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(theta, between))
        with batch.data():
            pyro.sample("y", dist.Normal(mu, within), obs=batch.y)
