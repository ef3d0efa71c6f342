"""Three groups of numbers at four sites, with weights of all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.transforms import OrderedTransform

SOURCE = "Pyro's tutorials, Gaussian mixture model"
IDIOM = "Categorical row labels, ordered means"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(35)
    k = rng.choice(3, 200, p=[0.3, 0.5, 0.2])
    return {
        "client": np.arange(200) % 4,
        "y": np.array([-3.0, 0.5, 4.0])[k] + 0.8 * rng.standard_normal(200),
    }


def model(batch: Any) -> None:
    """Means are ordered by an ordered transform."""
    weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(3)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    base = dist.Normal(torch.zeros(3), 5.0).to_event(1)
    locs = pyro.sample("locs", dist.TransformedDistribution(base, [OrderedTransform()]))
    with batch.clients(), batch.data():
        k = pyro.sample("k", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(locs[k], scale), obs=batch.y)
