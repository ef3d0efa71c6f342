"""Manuscripts of monks: a zero-inflated Poisson."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking, m12.3"
IDIOM = "a distribution of classes of its own"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(17)
    y = rng.poisson(1.3, 120) * (rng.random(120) > 0.25)
    return {"client": np.repeat(np.arange(8), 15), "y": y.astype(float)}


def model(batch: Any) -> None:
    """Days off, and a rate of each monastery."""
    p = pyro.sample("p", dist.Beta(2.0, 6.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.Exponential(2.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.ZeroInflatedPoisson(torch.exp(a), gate=p), obs=batch.y)
