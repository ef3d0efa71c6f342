"""Ages of 13 children by 34 graded signs of known difficulty."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume I, Bones"
IDIOM = "Categorical signs with known cuts"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(0)
    slope, low = rng.uniform(0.5, 3.0, 34), rng.uniform(0.0, 16.0, 34)
    gap, age = rng.uniform(0.5, 3.0, 34), rng.uniform(1.0, 18.0, 13)
    at = age[:, None] - np.stack([low, low + gap], 0)[:, None]
    grade = (rng.random((13, 34)) < 1.0 / (1.0 + np.exp(-slope * at))).cumprod(0).sum(0)
    signs = {n: np.tile(v, 13) for n, v in (("slope", slope), ("low", low), ("gap", gap))}
    return {"client": np.repeat(np.arange(13), 34), "grade": grade.ravel(), **signs}


def model(batch: Any) -> None:
    """A sign has grade 0, 1 or 2."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1000.0))
    sd = pyro.sample("sd", dist.HalfCauchy(10.0))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(mu, sd))
        with batch.data():
            first = torch.sigmoid(batch.slope * (theta - batch.low))
            second = torch.sigmoid(batch.slope * (theta - batch.low - batch.gap))
            p = torch.stack([1.0 - first, first - first * second, first * second], -1)
            pyro.sample("grade", dist.Categorical(p), obs=batch.grade)
