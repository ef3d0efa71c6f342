"""Survival of tadpoles in 48 tanks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "Statistical Rethinking, m13.2"
IDIOM = "one row a client"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(11)
    n = np.repeat([10.0, 25, 35], 16)
    p = 1 / (1 + np.exp(-(1.4 + 1.6 * rng.standard_normal(48))))
    return {"client": np.arange(48), "n": n, "s": rng.binomial(n.astype(int), p).astype(float)}


def model(batch: Any) -> None:
    """Log odds of tanks."""
    a_bar = pyro.sample("a_bar", dist.Normal(0.0, 1.5))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(a_bar, sigma))
        with batch.data():
            pyro.sample("s", dist.Binomial(batch.n, logits=a), obs=batch.s)
