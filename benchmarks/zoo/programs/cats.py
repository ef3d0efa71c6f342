"""Days until cats of ten shelters are adopted, some of whom still wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine

SOURCE = "Statistical Rethinking, adoptions of cats"
IDIOM = "poutine.mask by rows, a factor of censored ones"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(67)
    client, black = np.repeat(np.arange(10), 20), rng.integers(0, 2, 200)
    mean = np.where(black == 1, 50.0, 40.0) * np.exp(0.3 * rng.standard_normal(10))[client]
    adopted_on, end = rng.exponential(mean), rng.exponential(80.0, 200)
    days, adopted = np.minimum(adopted_on, end), adopted_on <= end
    return {"client": client, "black": black, "days": days, "adopted": adopted}


def model(batch: Any) -> None:
    """Exponential times with a level of each color and an effect of each shelter."""
    a = pyro.sample("a", dist.Normal(torch.tensor([3.0, 3.0]), 1.0).to_event(1))
    s = pyro.sample("s", dist.Exponential(1.0))
    with batch.clients():
        u = pyro.sample("u", dist.Normal(0.0, s))
        with batch.data():
            rate = torch.exp(-(a[batch.black] + u))
            with poutine.mask(mask=batch.adopted):
                pyro.sample("days", dist.Exponential(rate), obs=batch.days)
            with poutine.mask(mask=~batch.adopted):
                pyro.factor("waiting", -rate * batch.days)
