"""Ruggedness and wealth of nations in four continents: a PyroModule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample

SOURCE = "Pyro's tutorials, Bayesian regression"
IDIOM = "PyroModule with PyroSample"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(31)
    client = np.repeat(np.arange(4), 30)
    rugged, africa = rng.gamma(1.5, 0.8, 120), (client == 0).astype(float)
    level = rng.normal(0.0, 0.4, 4)[client]
    y = 9.2 - 1.0 * africa - 0.2 * rugged + 0.4 * africa * rugged + level
    x = np.stack([africa, rugged, africa * rugged], -1)
    return {"client": client, "x": x, "y": y + 0.9 * rng.standard_normal(120)}


class Regression(PyroModule):
    """A linear layer whose weights are random, and a level of each continent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = PyroModule[torch.nn.Linear](3, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 10.0).expand([1]).to_event(1))

    def forward(self, batch: Any) -> None:
        """Log GDP given ruggedness, within and outside Africa."""
        sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        mean = self.linear(batch.x).squeeze(-1)
        with batch.clients():
            level = pyro.sample("level", dist.Normal(0.0, tau))
            with batch.data():
                pyro.sample("y", dist.Normal(mean + level, sigma), obs=batch.y)


model = Regression()
