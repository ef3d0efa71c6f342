"""Waiting for money: 20 people's hyperbolic discounting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Vincent (2016), hierarchical discounting; hBayesDM, dd_hyperbolic"
IDIOM = "nonlinear, local log-normals"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(64)
    client = np.repeat(np.arange(20), 25)
    now, delay = rng.uniform(10, 90, 500), rng.choice([7.0, 30, 90, 180], 500)
    k = np.exp(rng.normal(-4.0, 0.8, 20))[client]
    y = rng.random(500) < 1 / (1 + np.exp(-0.15 * (100 / (1 + k * delay) - now)))
    return {"client": client, "now": now, "delay": delay, "y": y.astype(float)}


def model(batch: Any) -> None:
    """The log of a rate of each person, and one sensitivity."""
    mu = pyro.sample("mu", dist.Normal(-4.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.LogNormal(-2.0, 1.0))
    with batch.clients():
        log_k = pyro.sample("log_k", dist.Normal(mu, tau))
        with batch.data():
            later = 100.0 / (1.0 + torch.exp(log_k) * batch.delay)
            pyro.sample("y", dist.Bernoulli(logits=beta * (later - batch.now)), obs=batch.y)
