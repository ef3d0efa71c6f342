"""Fish caught by visitors of eight camps, some of whom do not fish."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "NumPyro, zero-inflated Poisson; UCLA's fish data"
IDIOM = "zero inflation by an enumerated site"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(36)
    client, x = np.repeat(np.arange(8), 20), rng.standard_normal(160)
    rate = np.exp(0.8 + 0.5 * x + 0.4 * rng.standard_normal(8)[client])
    return {"client": client, "x": x, "y": np.where(rng.random(160) < 0.35, 0.0, rng.poisson(rate))}


def model(batch: Any) -> None:
    """Whether a visitor fishes is a site of each row."""
    gate = pyro.sample("gate", dist.Beta(2.0, 2.0))
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        camp = pyro.sample("camp", dist.Normal(0.0, tau))
        with batch.data():
            fishes = pyro.sample("fishes", dist.Bernoulli(1.0 - gate))
            rate = torch.exp(a + camp + b * batch.x)
            pyro.sample("y", dist.Poisson(fishes * rate + 1e-6), obs=batch.y)
