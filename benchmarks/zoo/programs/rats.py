"""Weights of 30 rats over five weeks: a line of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "BUGS volume I, Rats"
IDIOM = "vague priors, unscaled rows"
LOGS = ("tau_beta",)  # slopes may be equal, so that it has the prior's tail: no variance


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(4)
    x = np.tile([8.0, 15, 22, 29, 36], 30)
    a, b = np.repeat(rng.normal(242, 14, 30), 5), np.repeat(rng.normal(6.2, 0.5, 30), 5)
    y = a + b * (x - 22) + rng.normal(0, 6, 150)
    return {"client": np.repeat(np.arange(30), 5), "x": x, "y": y.round()}


def model(batch: Any) -> None:
    """Intercepts and slopes with priors as vague as the book's."""
    alpha_c = pyro.sample("alpha_c", dist.Normal(0.0, 1000.0))
    beta_c = pyro.sample("beta_c", dist.Normal(0.0, 1000.0))
    tau_alpha = pyro.sample("tau_alpha", dist.Gamma(0.001, 0.001))
    tau_beta = pyro.sample("tau_beta", dist.Gamma(0.001, 0.001))
    tau_c = pyro.sample("tau_c", dist.Gamma(0.001, 0.001))
    with batch.clients():
        alpha = pyro.sample("alpha", dist.Normal(alpha_c, tau_alpha**-0.5))
        beta = pyro.sample("beta", dist.Normal(beta_c, tau_beta**-0.5))
        with batch.data():
            loc = alpha + beta * (batch.x - 22.0)
            pyro.sample("y", dist.Normal(loc, tau_c**-0.5), obs=batch.y)
