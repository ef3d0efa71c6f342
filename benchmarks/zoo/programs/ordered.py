"""Ordered answers of 12 persons, with cutpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking, m12.5; NumPyro, ordinal regression"
IDIOM = "an ordered vector"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(18)
    client, x = np.repeat(np.arange(12), 15), rng.standard_normal(180)
    eta = rng.normal(0, 0.8, 12)[client] + 0.7 * x + rng.logistic(size=180)
    return {"client": client, "x": x, "y": (eta[:, None] > [-1.0, 0.5, 2.0]).sum(1)}


def model(batch: Any) -> None:
    """Cumulative logits with cutpoints made of positive steps."""
    first = pyro.sample("first", dist.Normal(0.0, 2.0))
    steps = pyro.sample("steps", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    cuts = torch.cat([first[..., None], first[..., None] + torch.cumsum(steps, -1)], -1)
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, tau))
        with batch.data():
            eta = a + slope * batch.x
            pyro.sample("y", dist.OrderedLogistic(eta, cuts), obs=batch.y)
