"""Returns of ten stocks with volatility of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "posteriordb and NumPyro, stochastic volatility, as a scale of each series"
IDIOM = "a local log scale"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(14)
    scale = np.repeat(np.exp(-1.0 + 0.6 * rng.standard_normal(10)), 25)
    return {"client": np.repeat(np.arange(10), 25), "r": scale * rng.standard_t(6, 250)}


def model(batch: Any) -> None:
    """A log scale of each series, and Student's t returns."""
    nu = pyro.sample("nu", dist.Exponential(0.1))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        h = pyro.sample("h", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("r", dist.StudentT(nu + 2.0, 0.0, torch.exp(h)), obs=batch.r)
