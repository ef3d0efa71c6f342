"""Childhood cancer and X-rays in 60 strata of age and year."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "BUGS volume I, Oxford"
IDIOM = "two observed sites, one row a client"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(46)
    year = np.tile(np.arange(-5.0, 7.0), 5)
    n = rng.integers(20, 80, (60, 2)).astype(float)
    mu = rng.normal(-1.0, 0.8, 60)
    log_psi = 0.55 - 0.045 * year + 0.1 * rng.standard_normal(60)
    r0 = rng.binomial(n[:, 0].astype(int), 1 / (1 + np.exp(-mu)))
    r1 = rng.binomial(n[:, 1].astype(int), 1 / (1 + np.exp(-mu - log_psi)))
    return {
        "client": np.arange(60),
        "year": year,
        "n": n,
        "r": np.stack([r0, r1], -1).astype(float),
    }


def model(batch: Any) -> None:
    """An odds ratio with a trend over years and an effect of each stratum."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 5.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        b = pyro.sample("b", dist.Normal(0.0, sigma))
        with batch.data():
            log_psi = alpha + beta * batch.year + b
            n, r = batch.n, batch.r
            pyro.sample("r0", dist.Binomial(n[..., 0], logits=mu), obs=r[..., 0])
            pyro.sample("r1", dist.Binomial(n[..., 1], logits=mu + log_psi), obs=r[..., 1])
