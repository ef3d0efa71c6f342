"""Survival given age, which is missing for a fifth of the passengers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "NumPyro, Bayesian imputation for missing values in discrete covariates"
IDIOM = "obs_mask"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(37)
    client = np.repeat(np.arange(3), 50)
    age = rng.normal([0.4, 0.0, -0.3], 1.0, (50, 3)).T.ravel()
    y = rng.random(150) < 1 / (1 + np.exp(0.6 * age - np.array([0.8, 0.0, -0.8])[client]))
    seen = rng.random(150) < 0.8
    return {"client": client, "age": np.where(seen, age, 0.0), "seen": seen, "y": y.astype(float)}


def model(batch: Any) -> None:
    """A class of passengers has a mean age and a level."""
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        level = pyro.sample("level", dist.Normal(0.0, tau))
        with batch.data():
            prior = dist.Normal(mean, sigma)
            age = pyro.sample("age", prior, obs=batch.age, obs_mask=batch.seen)
            pyro.sample("y", dist.Bernoulli(logits=level + b * age), obs=batch.y)
