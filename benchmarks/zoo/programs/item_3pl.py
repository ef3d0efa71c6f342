"""A test of 120 persons on 10 items with guessing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Stan case studies and edstan, 3PL"
IDIOM = "a mixture of probabilities, scale times local"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(102)
    a, b, c = np.exp(0.3 * rng.standard_normal(10)), rng.standard_normal(10), rng.beta(5, 17, 10)
    theta = rng.standard_normal((120, 1))
    p = c + (1 - c) / (1 + np.exp(-a * (theta - b)))
    client, item = np.repeat(np.arange(120), 10), np.tile(np.arange(10), 120)
    y = (rng.random((120, 10)) < p).ravel().astype(float)
    return {"client": client, "item": item, "y": y}


def model(batch: Any) -> None:
    """Three-parameter logistic item responses."""
    a = pyro.sample("a", dist.LogNormal(torch.zeros(10), 0.5).to_event(1))
    b = pyro.sample("b", dist.Normal(torch.zeros(10), 1.5).to_event(1))
    c = pyro.sample("c", dist.Beta(5.0 * torch.ones(10), 17.0).to_event(1))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with batch.data():
            p = torch.sigmoid(a[batch.item] * (theta - b[batch.item]))
            guess = c[batch.item]
            pyro.sample("y", dist.Bernoulli(probs=guess + (1.0 - guess) * p), obs=batch.y)
