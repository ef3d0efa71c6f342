"""Counts of 20 sites by 10 visits with a Normal shift a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "posteriordb, GLMM_Poisson; brms, observation-level effects"
IDIOM = "a site a row, 200 rows"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(20)
    client = np.repeat(np.arange(20), 10)
    eta = 1.0 + 0.5 * rng.standard_normal(20)[client] + 0.6 * rng.standard_normal(200)
    return {"client": client, "y": rng.poisson(np.exp(eta)).astype(float)}


def model(batch: Any) -> None:
    """Over-dispersion within and between sites."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(mu, tau))
        with batch.data():
            shift = pyro.sample("shift", dist.Normal(0.0, spread))
            pyro.sample("y", dist.Poisson(torch.exp(own + shift)), obs=batch.y)
