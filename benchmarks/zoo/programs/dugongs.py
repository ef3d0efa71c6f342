"""Length and age of 27 dugongs: an asymptotic curve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "BUGS volume II, Dugongs"
IDIOM = "no local site, nonlinear"


def rows() -> dict[str, Any]:
    """Return the rows."""
    x = [1.0, 1.5, 1.5, 1.5, 2.5, 4.0, 5.0, 5.0, 7.0, 8.0, 8.5, 9.0, 9.5, 9.5, 10.0, 12.0, 12.0]
    x += [13.0, 13.0, 14.5, 15.5, 15.5, 16.5, 17.0, 22.5, 29.0, 31.5]
    y = [1.8, 1.85, 1.87, 1.77, 2.02, 2.27, 2.15, 2.26, 2.47, 2.19, 2.26, 2.40, 2.39, 2.41, 2.50]
    y += [2.32, 2.32, 2.43, 2.47, 2.56, 2.65, 2.47, 2.64, 2.56, 2.70, 2.72, 2.57]
    return {"client": np.arange(27) % 3, "x": np.array(x), "y": np.array(y)}


def model(batch: Any) -> None:
    """Growth towards a limit."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 1000.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1000.0))
    gamma = pyro.sample("gamma", dist.Uniform(0.5, 1.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
    with batch.clients(), batch.data():
        loc = alpha - beta * gamma**batch.x
        pyro.sample("y", dist.Normal(loc, sigma), obs=batch.y)
