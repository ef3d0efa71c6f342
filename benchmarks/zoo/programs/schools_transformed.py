"""Eight schools, decentered by a transformed distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.transforms import AffineTransform

SOURCE = "NumPyro's front page, eight schools"
IDIOM = "TransformedDistribution of a local site"


def rows() -> dict[str, Any]:
    """Return the rows."""
    y = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    s = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
    return {"client": np.arange(8), "y": y, "s": s}


def model(batch: Any) -> None:
    """A standard Normal, moved and scaled."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with batch.clients():
        base = dist.Normal(torch.zeros(()), 1.0)
        moved = dist.TransformedDistribution(base, [AffineTransform(mu, tau)])
        theta = pyro.sample("theta", moved)
        with batch.data():
            pyro.sample("y", dist.Normal(theta, batch.s), obs=batch.y)
