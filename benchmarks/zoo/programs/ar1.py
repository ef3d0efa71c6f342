"""Ten series with a coefficient of their own: AR(1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "posteriordb, arK; NumPyro, ar2"
IDIOM = "lagged rows as a field"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(21)
    y = np.zeros((10, 21))
    rho = np.clip(rng.normal(0.5, 0.2, 10), -0.9, 0.9)
    for t in range(20):
        y[:, t + 1] = 0.5 + rho * y[:, t] + 0.5 * rng.standard_normal(10)
    client = np.repeat(np.arange(10), 20)
    return {"client": client, "before": y[:, :-1].ravel(), "y": y[:, 1:].ravel()}


def model(batch: Any) -> None:
    """Coefficients of series within -1 and 1."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 1.0))
    a = pyro.sample("a", dist.Gamma(2.0, 0.5))
    b = pyro.sample("b", dist.Gamma(2.0, 0.5))
    sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
    with batch.clients():
        rho = pyro.sample("rho", dist.Beta(a, b))
        with batch.data():
            loc = alpha + (2.0 * rho - 1.0) * batch.before
            pyro.sample("y", dist.Normal(loc, sigma), obs=batch.y)
