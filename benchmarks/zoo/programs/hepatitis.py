"""Antibodies of 40 vaccinated children: lines about a first value measured with error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "BUGS volume I, Hepatitis with measurement error"
IDIOM = "a client field observed about a local site, vague precisions"
LOGS = ("psi", "tau_a", "tau_b", "tau")


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(3)
    client, t = np.repeat(np.arange(40), 3), np.tile([5.5, 6.5, 7.6], 40) - 6.5
    mu0 = 6 + 1.2 * rng.normal(size=40)
    y0 = mu0 + 0.8 * rng.normal(size=40)
    a = 6 + 0.7 * (mu0 - 6) + rng.normal(size=40)
    b = -1 + 0.15 * rng.normal(size=40)
    y = a[client] + b[client] * t + 0.8 * rng.normal(size=120)
    return {"client": client, "t": t, "y": y, "of_clients": {"y0": y0.astype("float32")}}


def model(batch: Any) -> None:
    """The noise of the first value is that of the others."""
    alpha0 = pyro.sample("alpha0", dist.Normal(0.0, 100.0))
    beta0 = pyro.sample("beta0", dist.Normal(0.0, 100.0))
    gamma = pyro.sample("gamma", dist.Normal(0.0, 100.0))
    theta = pyro.sample("theta", dist.Normal(0.0, 100.0))
    psi = pyro.sample("psi", dist.Gamma(0.001, 0.001))
    tau_a = pyro.sample("tau_a", dist.Gamma(0.001, 0.001))
    tau_b = pyro.sample("tau_b", dist.Gamma(0.001, 0.001))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    with batch.clients():
        mu0 = pyro.sample("mu0", dist.Normal(theta, psi**-0.5))
        alpha = pyro.sample("alpha", dist.Normal(alpha0, tau_a**-0.5))
        beta = pyro.sample("beta", dist.Normal(beta0, tau_b**-0.5))
        pyro.sample("y0", dist.Normal(mu0, tau**-0.5), obs=batch.y0)
        with batch.data():
            mu = alpha + beta * batch.t + gamma * (mu0 - 6.0)
            pyro.sample("y", dist.Normal(mu, tau**-0.5), obs=batch.y)
