"""Survival in two treatments of 16 litters: beta-binomials."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "BUGS volume I, Litters"
IDIOM = "local sites alone"


def rows() -> dict[str, Any]:
    """Return the rows."""
    n = [13.0, 12, 9, 9, 8, 8, 12, 11, 9, 9, 8, 11, 4, 5, 7, 7]
    n += [12.0, 11, 10, 9, 10, 9, 9, 8, 9, 4, 7, 10, 9, 3, 13, 7]
    r = [13.0, 12, 9, 9, 8, 8, 12, 10, 8, 8, 6, 9, 3, 4, 5, 4]
    r += [12.0, 11, 10, 9, 10, 9, 8, 7, 8, 3, 5, 6, 4, 1, 5, 0]
    return {"client": np.repeat([0, 1], 16), "r": np.array(r), "n": np.array(n)}


def model(batch: Any) -> None:
    """A mean and a concentration of each treatment; nothing is shared."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Beta(1.0, 1.0))
        theta = pyro.sample("theta", dist.HalfCauchy(1.0))
        with batch.data():
            a, b = mu / theta, (1.0 - mu) / theta
            pyro.sample("r", dist.BetaBinomial(a, b, batch.n), obs=batch.r)
