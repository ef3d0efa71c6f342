"""Survival of mice under four treatments, some censored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume I, Mice"
IDIOM = "Weibull, censoring by a factor"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(47)
    client = np.repeat(np.arange(4), 20)
    t = rng.weibull(2.9, 80) * np.array([24.0, 32, 23, 30])[client] / 10
    return {"client": client, "t": np.minimum(t, 4.0), "dead": (t < 4.0).astype(float)}


def model(batch: Any) -> None:
    """The censored count by their survival."""
    shape = pyro.sample("shape", dist.Gamma(2.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(mu, tau))
        with batch.data():
            log_t = torch.log(batch.t)
            log_hazard = beta + torch.log(shape) + (shape - 1.0) * log_t
            pyro.factor("t", batch.dead * log_hazard - torch.exp(beta + shape * log_t))
