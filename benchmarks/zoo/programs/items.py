"""Twelve items of 60 pupils: abilities of clients, and items in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking, varying effects written without centering"
IDIOM = "a scale times a global vector, crossed with a scale times a local site"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(5)
    client, item = np.repeat(np.arange(60), 12), np.tile(np.arange(12), 60)
    hard, able = rng.normal(0.0, 1.2, 12), rng.normal(0.0, 0.9, 60)
    y = rng.random(720) < 1.0 / (1.0 + np.exp(hard[item] - able[client]))
    return {"client": client, "item": item, "y": y.astype(float)}


def model(batch: Any) -> None:
    """A pupil is a client."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.5))
    sigma_item = pyro.sample("sigma_item", dist.Exponential(1.0))
    sigma_pupil = pyro.sample("sigma_pupil", dist.Exponential(1.0))
    z = pyro.sample("z", dist.Normal(torch.zeros(12), 1.0).to_event(1))
    hard = pyro.deterministic("hard", mu + sigma_item * z)
    with batch.clients():
        able = pyro.sample("able", dist.Normal(0.0, 1.0))
        with batch.data():
            logits = sigma_pupil * able - hard[..., batch.item]
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)
