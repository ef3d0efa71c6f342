"""Milk of 18 species groups: brain sizes that are partly unknown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking, m15.5; brms, mi()"
IDIOM = "a missing covariate as a site a row, where() of the seen"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(136)
    client = np.repeat(np.arange(18), 15)
    m = rng.standard_normal(270)
    b = 0.6 * m + 0.8 * rng.standard_normal(270)
    k = 0.5 * b - 0.6 * m + 0.4 * rng.standard_normal(18)[client] + 0.7 * rng.standard_normal(270)
    seen = (rng.random(270) < 0.75).astype(float)
    return {"client": client, "m": m, "b": b * seen, "seen": seen, "k": k}


def model(batch: Any) -> None:
    """Unknown brain sizes come from their own regression on mass."""
    a = pyro.sample("a", dist.Normal(torch.zeros(2), 0.5).to_event(1))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(3), 0.5).to_event(1))
    sigma = pyro.sample("sigma", dist.Exponential(torch.ones(2)).to_event(1))
    tau = pyro.sample("tau", dist.Exponential(1.0))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(a[0], tau))
        with batch.data():
            of_b = dist.Normal(a[1] + slope[2] * batch.m, sigma[1])
            drawn = pyro.sample("b_unknown", of_b)
            with pyro.poutine.mask(mask=batch.seen > 0.5):
                pyro.sample("b", of_b, obs=batch.b)
            b = torch.where(batch.seen > 0.5, batch.b, drawn)
            loc = own + slope[0] * b + slope[1] * batch.m
            pyro.sample("k", dist.Normal(loc, sigma[0]), obs=batch.k)
