"""A test of 150 persons on 8 items with slopes of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "posteriordb, irt_2pl; NumPyro forum and brms, with weak priors"
IDIOM = "scale times local"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(3)
    a, b = np.exp(0.4 * rng.standard_normal(8)), rng.standard_normal(8)
    theta = rng.standard_normal(150)
    y = rng.random((150, 8)) < 1 / (1 + np.exp(-a * (theta[:, None] - b)))
    client, item = np.repeat(np.arange(150), 8), np.tile(np.arange(8), 150)
    return {"client": client, "item": item, "y": y.ravel().astype(float)}


def model(batch: Any) -> None:
    """Two-parameter logistic item responses."""
    a = pyro.sample("a", dist.LogNormal(torch.zeros(8), 0.5).to_event(1))
    b = pyro.sample("b", dist.Normal(torch.zeros(8), 2.0).to_event(1))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with batch.data():
            eta = a[batch.item] * (theta - b[batch.item])
            pyro.sample("y", dist.Bernoulli(logits=eta), obs=batch.y)
