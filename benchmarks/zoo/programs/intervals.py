"""Times that are known to lie between two visits, or before the first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Stan user's guide, censored data; PyMC, censored data"
IDIOM = "interval- and left-censored rows by cdf, poutine.mask around factors"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(20)
    client = np.repeat(np.arange(10), 12)
    y = 2 + 0.7 * rng.normal(size=10)[client] + rng.normal(size=120)
    low = np.floor(y)
    return {"client": client, "low": low, "high": low + 1, "left": y < 0.5}


def model(batch: Any) -> None:
    """One factor of those before the first visit, and one of the others."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
    tau = pyro.sample("tau", dist.HalfCauchy(2.5))
    with batch.clients():
        u = pyro.sample("u", dist.Normal(mu, tau))
        with batch.data():
            fn = dist.Normal(u, sigma)
            between = torch.log(fn.cdf(batch.high) - fn.cdf(batch.low))
            before = torch.log(fn.cdf(torch.tensor(0.5)))
            with pyro.poutine.mask(mask=batch.left):
                pyro.factor("before", before)
            with pyro.poutine.mask(mask=~batch.left):
                pyro.factor("between", between)
