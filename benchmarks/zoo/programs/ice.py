"""Cancer by age and cohort: a smooth walk over eleven cohorts, in Poisson counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume II, Ice"
IDIOM = "a global walk by cumsum, integer codes"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(45)
    client, cohort = (
        np.repeat(np.arange(13), 6),
        (np.tile(np.arange(6), 13) + np.repeat(np.arange(13), 6) // 2) % 11,
    )
    beta = np.cumsum(rng.normal(0, 0.2, 11))
    n = rng.gamma(5.0, 100.0, 78)
    y = rng.poisson(n * np.exp(-3.5 + 0.1 * client + beta[cohort]))
    return {"client": client, "cohort": cohort, "n": n, "y": y.astype(float)}


def model(batch: Any) -> None:
    """A client is an age, and each row picks its cohort."""
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    steps = pyro.sample("steps", dist.Normal(torch.zeros(11), 1.0).to_event(1))
    beta = pyro.deterministic("beta", torch.cumsum(sigma * steps, -1))
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    with batch.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        with batch.data():
            rate = batch.n * torch.exp(alpha + beta[batch.cohort])
            pyro.sample("y", dist.Poisson(rate), obs=batch.y)
