"""Velocities of galaxies in four fields: a mixture of three Normals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "posteriordb, normal_mixture_k; Pyro, MixtureSameFamily"
IDIOM = "MixtureSameFamily, an ordered vector"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(40)
    k = rng.choice(3, 160, p=[0.2, 0.6, 0.2])
    return {
        "client": np.arange(160) % 4,
        "y": np.array([-4.0, 0.0, 5.0])[k] + rng.standard_normal(160),
    }


def model(batch: Any) -> None:
    """Steps between means are positive."""
    theta = pyro.sample("theta", dist.Dirichlet(2.0 * torch.ones(3)))
    first = pyro.sample("first", dist.Normal(-4.0, 3.0))
    steps = pyro.sample("steps", dist.LogNormal(torch.ones(2), 0.5).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    mu = torch.stack([first, first + steps[0], first + steps[0] + steps[1]], -1)
    with batch.clients(), batch.data():
        mix = dist.MixtureSameFamily(dist.Categorical(theta), dist.Normal(mu, sigma))
        pyro.sample("y", mix, obs=batch.y)
