"""Gifts within pairs of households of six villages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking, chapter 14"
IDIOM = "a correlated pair of sites a row, two observed counts"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(35)
    village = np.repeat(np.arange(6), 20)
    pairs = 0.7 * rng.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], 120)
    own = 0.4 * rng.standard_normal(6)[village]
    counts = rng.poisson(np.exp(0.6 + own[:, None] + pairs)).astype(float)
    return {"client": village, "there": counts[:, 0], "back": counts[:, 1]}


def model(batch: Any) -> None:
    """Counts of gifts in both directions."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    of_villages = pyro.sample("of_villages", dist.Exponential(1.0))
    of_pairs = pyro.sample("of_pairs", dist.Exponential(1.0))
    corr = pyro.sample("corr", dist.LKJCholesky(2, 8.0))
    with batch.clients():
        village = pyro.sample("village", dist.Normal(0.0, of_villages))
        with batch.data():
            pair = dist.MultivariateNormal(torch.zeros(2), scale_tril=of_pairs * corr)
            pair = pyro.sample("pair", pair)
            rates = (mean + village)[..., None] + pair
            pyro.sample("there", dist.Poisson(rates[..., 0].exp()), obs=batch.there)
            pyro.sample("back", dist.Poisson(rates[..., 1].exp()), obs=batch.back)
