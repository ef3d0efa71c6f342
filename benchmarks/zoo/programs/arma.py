"""Five series of an ARMA(1, 1), looped over 40 steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "posteriordb, arma-arma11"
IDIOM = "a loop over steps in columns"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(59)
    e = 0.5 * rng.standard_normal((5, 41))
    y = np.zeros((5, 41))
    for t in range(1, 41):
        y[:, t] = 0.3 + 0.6 * y[:, t - 1] + 0.3 * e[:, t - 1] + e[:, t]
    return {"client": np.arange(5), "y": y[:, 1:]}


def model(batch: Any) -> None:
    """Errors are carried from step to step."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    phi = pyro.sample("phi", dist.Normal(0.0, 2.0))
    theta = pyro.sample("theta", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
    with batch.clients(), batch.data():
        err = batch.y[..., 0] - (mu + phi * mu)
        pyro.sample("y_0", dist.Normal(mu + phi * mu, sigma), obs=batch.y[..., 0])
        for t in range(1, 40):
            nu = mu + phi * batch.y[..., t - 1] + theta * err
            err = batch.y[..., t] - nu
            pyro.sample(f"y_{t}", dist.Normal(nu, sigma), obs=batch.y[..., t])
