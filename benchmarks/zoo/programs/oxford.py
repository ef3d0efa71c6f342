"""Childhood cancer and X-rays: 120 tables with a vague baseline and an odds ratio each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "BUGS volume I, Oxford"
IDIOM = "two local sites, vague priors"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(0)
    year = rng.integers(-10, 11, 120).astype(float)
    base = rng.normal(-0.5, 0.7, 120)
    psi = 0.57 - 0.04 * year + 0.007 * (year**2 - 22.0) + 0.18 * rng.standard_normal(120)
    n = rng.integers(30, 120, (120, 2))
    logits = base[:, None] + psi[:, None] * [1.0, 0.0]
    r = rng.binomial(n, 1.0 / (1.0 + np.exp(-logits)))
    columns = {"year": np.repeat(year, 2), "exposed": np.tile([1.0, 0.0], 120)}
    client, n, r = np.repeat(np.arange(120), 2), n.ravel().astype(float), r.ravel().astype(float)
    return {"client": client, "n": n, "r": r, **columns}


def model(batch: Any) -> None:
    """An odds ratio with a trend over years and an effect of each table."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 1000.0))
    b1 = pyro.sample("b1", dist.Normal(0.0, 1000.0))
    b2 = pyro.sample("b2", dist.Normal(0.0, 1000.0))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1000.0))
        b = pyro.sample("b", dist.Normal(0.0, tau**-0.5))
        with batch.data():
            psi = alpha + b1 * batch.year + b2 * (batch.year**2 - 22.0) + b
            logits = mu + psi * batch.exposed
            pyro.sample("r", dist.Binomial(batch.n, logits=logits), obs=batch.r)
