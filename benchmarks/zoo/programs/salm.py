"""Mutagenicity of quinoline: colonies on three plates at six doses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume I, Salm"
IDIOM = "a site a row, no local site"


def rows() -> dict[str, Any]:
    """Return the rows."""
    y = [15.0, 21, 29, 16, 18, 21, 16, 26, 33, 27, 41, 60, 33, 38, 41, 20, 27, 42]
    x = np.repeat([0.0, 10, 33, 100, 333, 1000], 3)
    return {"client": np.repeat(np.arange(6), 3), "y": np.array(y), "x": x}


def model(batch: Any) -> None:
    """Over-dispersed counts by dose."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 10.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0))
    gamma = pyro.sample("gamma", dist.Normal(0.0, 0.1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients(), batch.data():
        extra = pyro.sample("extra", dist.Normal(0.0, sigma))
        eta = alpha + beta * torch.log(batch.x + 10) + gamma * batch.x / 100 + extra
        pyro.sample("y", dist.Poisson(torch.exp(eta)), obs=batch.y)
