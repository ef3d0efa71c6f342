"""Five questions of the Law School Aptitude Test, 1,000 students."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume I, LSAT"
IDIOM = "scale times local"


def rows() -> dict[str, Any]:
    """Return the rows."""
    patterns = np.array([[(p >> (4 - k)) & 1 for k in range(5)] for p in range(32)], float)
    ends = [3, 9, 11, 22, 23, 24, 27, 31, 32, 40, 40, 56, 56, 59, 61, 76, 86, 115, 129, 210]
    ends += [213, 241, 256, 336, 352, 408, 429, 602, 613, 674, 702, 1000]
    y = np.repeat(patterns, np.diff([0, *ends]), axis=0)
    client, item = np.repeat(np.arange(len(y)), 5), np.tile(np.arange(5), len(y))
    return {"client": client, "item": item, "y": y.ravel()}


def model(batch: Any) -> None:
    """A Rasch model with a common slope."""
    alpha = pyro.sample("alpha", dist.Normal(torch.zeros(5), 100.0).to_event(1))
    beta = pyro.sample("beta", dist.HalfNormal(100.0))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with batch.data():
            eta = beta * theta - alpha[batch.item]
            pyro.sample("y", dist.Bernoulli(logits=eta), obs=batch.y)
