"""Matches among eight players in five seasons."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "Stan's case study, Bradley-Terry"
IDIOM = "a global vector, two codes a row"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(68)
    skill = rng.normal(0, 1.0, 8)
    pair = np.stack([rng.choice(8, 2, replace=False) for _ in range(250)])
    home = rng.normal(0.3, 0.2, 5)
    client = np.repeat(np.arange(5), 50)
    logit = home[client] + skill[pair[:, 0]] - skill[pair[:, 1]]
    y = rng.random(250) < 1 / (1 + np.exp(-logit))
    return {"client": client, "pair": pair, "y": y.astype(float)}


def model(batch: Any) -> None:
    """Skills of players, and an advantage at home of each season."""
    s = pyro.sample("s", dist.HalfNormal(2.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    with pyro.plate("players", 8):
        skill = pyro.sample("skill", dist.Normal(0.0, s))
    with batch.clients():
        home = pyro.sample("home", dist.Normal(mu, tau))
        with batch.data():
            logits = home + skill[batch.pair[..., 0]] - skill[batch.pair[..., 1]]
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)
