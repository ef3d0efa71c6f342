"""Daily counts of eight shops over eight weeks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "NumPyro, Hierarchical forecasting (its weekday effects and level)"
IDIOM = "effects of weekdays and a walk over weeks, each with a scale"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(6)
    client, day = np.repeat(np.arange(8), 56), np.tile(np.arange(56), 8)
    of_day, walk = rng.normal(0.0, 0.4, 7), np.cumsum(rng.normal(0.0, 0.15, 8))
    shop = rng.normal(2.5, 0.3, 8)
    y = rng.poisson(np.exp(shop[client] + of_day[day % 7] + walk[day // 7]))
    return {"client": client, "weekday": day % 7, "week": day // 7, "y": y.astype(float)}


def model(batch: Any) -> None:
    """Weekdays and weeks are the same for all shops, which are clients."""
    mu = pyro.sample("mu", dist.Normal(2.0, 2.0))
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    sigma_day = pyro.sample("sigma_day", dist.HalfCauchy(1.0))
    sigma_walk = pyro.sample("sigma_walk", dist.HalfCauchy(1.0))
    day = pyro.sample("day", dist.Normal(torch.zeros(7), 1.0).to_event(1))
    step = pyro.sample("step", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    of_day, walk = sigma_day * day, torch.cumsum(sigma_walk * step, -1)
    with batch.clients():
        shop = pyro.sample("shop", dist.Normal(mu, tau))
        with batch.data():
            rate = torch.exp(shop + of_day[..., batch.weekday] + walk[..., batch.week])
            pyro.sample("y", dist.Poisson(rate), obs=batch.y)
