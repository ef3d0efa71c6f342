"""Deaths in twelve hospitals, with the vague priors of the book."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume I, Surgical"
IDIOM = "vague priors"


def rows() -> dict[str, Any]:
    """Return the rows."""
    n = [47.0, 148, 119, 810, 211, 196, 148, 215, 207, 97, 256, 360]
    r = [0.0, 18, 8, 46, 8, 13, 9, 31, 14, 8, 29, 24]
    return {"client": np.arange(12), "n": np.array(n), "r": np.array(r)}


def model(batch: Any) -> None:
    """Log odds of hospitals around a common mean."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1000.0))
    sigmasq = pyro.sample("sigmasq", dist.InverseGamma(0.001, 0.001))
    with batch.clients():
        b = pyro.sample("b", dist.Normal(mu, torch.sqrt(sigmasq)))
        with batch.data():
            pyro.sample("r", dist.Binomial(batch.n, logits=b), obs=batch.r)
