"""Lung function of patients over weeks: lines of each with Student t noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "NumPyro, Bayesian hierarchical linear regression"
IDIOM = "two local sites, unknown degrees of freedom"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(5)
    N, n = 18, 8
    c = np.repeat(np.arange(N), n)
    t = np.tile(np.linspace(0, 1, n), N)
    a = rng.normal(0, 1, N)[c]
    b = rng.normal(-0.5, 0.4, N)[c]
    return {"client": c, "t": t, "y": a + b * t + 0.3 * rng.standard_t(4, N * n)}


def model(batch: Any) -> None:
    """Lines over time with noise of unknown tails."""
    ma = pyro.sample("ma", dist.Normal(0.0, 10.0))
    sa = pyro.sample("sa", dist.HalfNormal(10.0))
    mb = pyro.sample("mb", dist.Normal(0.0, 10.0))
    sb = pyro.sample("sb", dist.HalfNormal(10.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(10.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(ma, sa))
        b = pyro.sample("b", dist.Normal(mb, sb))
        with batch.data():
            pyro.sample("y", dist.StudentT(nu, a + b * batch.t, sigma), obs=batch.y)
