"""Eight schools, decentered by a handler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam

SOURCE = "Pyro's examples, eight_schools; NumPyro's bad posterior geometry"
IDIOM = "handlers.reparam"


def rows() -> dict[str, Any]:
    """Return the rows."""
    y = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    s = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
    return {"client": np.arange(8), "y": y, "s": s}


@poutine.reparam(config={"theta": LocScaleReparam(0.0)})
def model(batch: Any) -> None:
    """Effects of coaching, with a half-Cauchy scale."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(theta, batch.s), obs=batch.y)
