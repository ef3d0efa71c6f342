"""Failures of ten pumps: Gamma rates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "BUGS volume I, Pumps"
IDIOM = "local Gamma sites alone"


def rows() -> dict[str, Any]:
    """Return the rows."""
    t = [94.3, 15.7, 62.9, 126.0, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5]
    x = [5.0, 1, 5, 14, 3, 19, 1, 1, 4, 22]
    return {"client": np.arange(10), "t": np.array(t), "x": np.array(x)}


def model(batch: Any) -> None:
    """Rates have a Gamma distribution with an unknown shape and rate."""
    alpha = pyro.sample("alpha", dist.Exponential(1.0))
    beta = pyro.sample("beta", dist.Gamma(0.1, 1.0))
    with batch.clients():
        theta = pyro.sample("theta", dist.Gamma(alpha, beta))
        with batch.data():
            pyro.sample("x", dist.Poisson(theta * batch.t), obs=batch.x)
