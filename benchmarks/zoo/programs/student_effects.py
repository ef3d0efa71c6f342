"""Five rows of 40 clients, whose effects have heavy tails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "Stan's prior choice recommendations, with the degrees of freedom unknown"
IDIOM = "local Student t sites of unknown degrees of freedom"
LOGS = ("nu",)


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(14)
    client = np.repeat(np.arange(40), 5)
    effect = rng.standard_t(3, 40) * 0.7
    return {"client": client, "y": effect[client] + rng.standard_normal(200)}


def model(batch: Any) -> None:
    """Effects of few clients are far from the others'."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        effect = pyro.sample("effect", dist.StudentT(nu, mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(effect, sigma), obs=batch.y)
