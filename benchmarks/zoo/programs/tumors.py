"""Tumors of rats in 40 earlier experiments: a flat prior by a factor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Gelman et al., BDA3, section 5.3"
IDIOM = "a factor as prior, improper uniform sites"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(57)
    n = rng.integers(15, 30, 40)
    y = rng.binomial(n, rng.beta(2.0, 12.0, 40))
    return {"client": np.arange(40), "n": n.astype(float), "y": y.astype(float)}


def model(batch: Any) -> None:
    """p(a, b) is proportional to (a + b)^(-5/2)."""
    positive = dist.constraints.positive
    a = pyro.sample("a", dist.ImproperUniform(positive, torch.Size(), torch.Size()))
    b = pyro.sample("b", dist.ImproperUniform(positive, torch.Size(), torch.Size()))
    pyro.factor("prior", -2.5 * torch.log(a + b))
    with batch.clients():
        theta = pyro.sample("theta", dist.Beta(a, b))
        with batch.data():
            pyro.sample("y", dist.Binomial(batch.n, theta), obs=batch.y)
