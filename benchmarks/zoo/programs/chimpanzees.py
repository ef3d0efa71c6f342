"""Which lever a chimpanzee pulls: actors, blocks and treatments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking, m13.4"
IDIOM = "a crossed vector of all clients"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(12)
    actor, block, treat = np.repeat(np.arange(7), 72), np.tile(np.repeat(np.arange(6), 12), 7), 0
    treat = np.tile(np.arange(4), 126)
    eta = rng.normal(0.6, 2.0, 7)[actor] + rng.normal(0, 0.2, 6)[block]
    eta = eta + np.array([-0.1, 0.4, -0.5, 0.3])[treat]
    y = (rng.random(504) < 1 / (1 + np.exp(-eta))).astype(float)
    return {"client": actor, "block": block, "treat": treat, "y": y}


def model(batch: Any) -> None:
    """Effects of blocks and treatments are of all clients, those of actors each client's."""
    b = pyro.sample("b", dist.Normal(torch.zeros(4), 0.5).to_event(1))
    sigma_g = pyro.sample("sigma_g", dist.Exponential(1.0))
    g = pyro.sample("g", dist.Normal(torch.zeros(6), sigma_g).to_event(1))
    a_bar = pyro.sample("a_bar", dist.Normal(0.0, 1.5))
    sigma_a = pyro.sample("sigma_a", dist.Exponential(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(a_bar, sigma_a))
        with batch.data():
            eta = a + g[batch.block] + b[batch.treat]
            pyro.sample("y", dist.Bernoulli(logits=eta), obs=batch.y)
