"""Ratings of two inhalers by 60 patients in two periods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.transforms import OrderedTransform

SOURCE = "BUGS volume I, Inhaler; NumPyro, ordinal regression"
IDIOM = "OrderedLogistic with a local site"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(42)
    client, period = np.repeat(np.arange(60), 2), np.tile([0.5, -0.5], 60)
    treat = np.where(client < 30, period, -period)
    eta = 0.8 * treat + 0.2 * period + np.repeat(rng.normal(0, 1.0, 60), 2)
    y = (eta + rng.logistic(size=120) > np.array([[0.5], [2.0], [3.5]])).sum(0)
    return {"client": client, "treat": treat, "period": period, "y": y}


def model(batch: Any) -> None:
    """Cuts with an ordered transform, and a Normal effect of each patient."""
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0))
    pi = pyro.sample("pi", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    base = dist.Normal(torch.zeros(3), 3.0).to_event(1)
    cuts = pyro.sample("cuts", dist.TransformedDistribution(base, [OrderedTransform()]))
    with batch.clients():
        b = pyro.sample("b", dist.Normal(0.0, sigma))
        with batch.data():
            eta = beta * batch.treat + pi * batch.period + b
            pyro.sample("y", dist.OrderedLogistic(eta, cuts), obs=batch.y)
