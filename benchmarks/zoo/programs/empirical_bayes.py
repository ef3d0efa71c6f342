"""Normal means whose hyperparameters are params."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Pyro's SVI tutorials, empirical Bayes"
IDIOM = "pyro.param in the model"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(53)
    client = np.repeat(np.arange(20), 5)
    return {
        "client": client,
        "y": 2.0 + 0.8 * rng.standard_normal(20)[client] + rng.standard_normal(100),
    }


def model(batch: Any) -> None:
    """Location and scale are learned, not sampled."""
    loc = pyro.param("loc", torch.tensor(0.0))
    scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(loc, scale))
        with batch.data():
            pyro.sample("y", dist.Normal(theta, sigma), obs=batch.y)
