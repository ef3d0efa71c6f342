"""Rates of clients that are of one of two kinds: a mixture as their prior."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Stan user's guide, mixture priors"
IDIOM = "a local mixture prior"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(9)
    N, n = 24, 6
    k = rng.random(N) < 0.4
    th = np.where(k, rng.normal(-1, 0.3, N), rng.normal(1.2, 0.3, N))
    c = np.repeat(np.arange(N), n)
    return {"client": c, "y": rng.poisson(np.exp(th[c])).astype(float)}


def model(batch: Any) -> None:
    """Log rates are of a low or a high kind."""
    w = pyro.sample("w", dist.Beta(2.0, 2.0))
    lo = pyro.sample("lo", dist.Normal(-1.0, 1.0))
    gap = pyro.sample("gap", dist.HalfNormal(2.0))
    s = pyro.sample("s", dist.HalfNormal(0.5))
    with batch.clients():
        mix = dist.Categorical(torch.stack([w, 1 - w]))
        th = pyro.sample(
            "th", dist.MixtureSameFamily(mix, dist.Normal(torch.stack([lo, lo + gap]), s))
        )
        with batch.data():
            pyro.sample("y", dist.Poisson(th.exp()), obs=batch.y)
