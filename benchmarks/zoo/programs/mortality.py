"""Deaths in nine regions by age and sex."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "NumPyro, Modelling mortality over space and time"
IDIOM = "a walk over ages, whose steps a global site scales"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(31)
    client, age = np.repeat(np.arange(9), 20), np.tile(np.arange(10), 18)
    sex, n = rng.integers(0, 2, 180), rng.integers(200, 2000, 180)
    base = -6.0 + np.cumsum(np.r_[0.0, 0.5 + 0.15 * rng.standard_normal(9)])
    logits = base[age] + 0.3 * sex + 0.25 * rng.standard_normal(9)[client]
    d = rng.binomial(n, 1.0 / (1.0 + np.exp(-logits)))
    return {"client": client, "age": age, "sex": sex, "n": n.astype(float), "d": d.astype(float)}


def model(batch: Any) -> None:
    """Regions are clients, and ages are steps of a walk."""
    intercept = pyro.sample("intercept", dist.Normal(0.0, 10.0))
    sigma_age = pyro.sample("sigma_age", dist.HalfNormal(1.0))
    with pyro.plate("ages", 9, dim=-1):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    by_sex = pyro.sample("by_sex", dist.Normal(0.0, 1.0))
    between = pyro.sample("between", dist.HalfNormal(1.0))
    walk = torch.cat([torch.zeros(1), torch.cumsum(sigma_age * z, -1)], -1)
    with batch.clients():
        region = pyro.sample("region", dist.Normal(0.0, between))
        with batch.data():
            logits = intercept + walk[..., batch.age] + by_sex * batch.sex + region
            pyro.sample("d", dist.Binomial(batch.n, logits=logits), obs=batch.d)
