"""A regression by a network with five hidden units."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "NumPyro, Bayesian neural network"
IDIOM = "no local site, many modes"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(67)
    x = rng.uniform(-1, 1, 60)
    y = 3 * x**3 - x + 0.1 * rng.standard_normal(60)
    return {"client": np.arange(60) % 3, "x": x, "y": y}


def model(batch: Any) -> None:
    """Hidden units can be exchanged, so that there are many modes."""
    w1 = pyro.sample("w1", dist.Normal(torch.zeros(2, 5), 1.0).to_event(2))
    w2 = pyro.sample("w2", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    precision = pyro.sample("precision", dist.Gamma(3.0, 1.0))
    with batch.clients(), batch.data():
        inputs = torch.stack([batch.x, torch.ones_like(batch.x)], -1)
        loc = (torch.tanh(inputs @ w1) * w2).sum(-1)
        pyro.sample("y", dist.Normal(loc, precision**-0.5), obs=batch.y)
