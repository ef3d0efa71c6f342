"""Divorce rates measured with errors, in four regions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking, m15.1"
IDIOM = "measurement error, a site a row"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(65)
    x, sd = rng.standard_normal((50, 2)), rng.uniform(0.2, 0.9, 50)
    true = -0.6 * x[:, 0] + 0.1 * x[:, 1] + 0.5 * rng.standard_normal(50)
    return {"client": np.arange(50) % 4, "x": x, "sd": sd, "y": true + sd * rng.standard_normal(50)}


def model(batch: Any) -> None:
    """The true rate of each state is a site of its row."""
    a = pyro.sample("a", dist.Normal(0.0, 0.2))
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 0.5).to_event(1))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    with batch.clients(), batch.data():
        true = pyro.sample("true", dist.Normal(a + (batch.x * b).sum(-1), sigma))
        pyro.sample("y", dist.Normal(true, batch.sd), obs=batch.y)
