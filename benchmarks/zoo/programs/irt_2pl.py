"""A test of 20 persons on 10 items with slopes of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "posteriordb, irt_2pl"
IDIOM = "scale times local"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(2)
    a, b = np.exp(0.4 * rng.standard_normal(10)), rng.standard_normal(10)
    theta = rng.standard_normal(20)
    y = rng.random((20, 10)) < 1 / (1 + np.exp(-a * (theta[:, None] - b)))
    return {"client": np.arange(20), "y": y.astype(float)}


def model(batch: Any) -> None:
    """Two-parameter logistic item responses."""
    sigma_a = pyro.sample("sigma_a", dist.HalfCauchy(2.0))
    a = pyro.sample("a", dist.LogNormal(torch.zeros(10), sigma_a).to_event(1))
    mu_b = pyro.sample("mu_b", dist.Normal(0.0, 5.0))
    sigma_b = pyro.sample("sigma_b", dist.HalfCauchy(2.0))
    b = pyro.sample("b", dist.Normal(mu_b + torch.zeros(10), sigma_b).to_event(1))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with batch.data():
            eta = a * (theta[..., None] - b)
            pyro.sample("y", dist.Bernoulli(logits=eta).to_event(1), obs=batch.y)
