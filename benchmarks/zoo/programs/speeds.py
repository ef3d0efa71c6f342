"""Answers and times of 40 persons: an ability and a speed of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "van der Linden 2007, by Stan's case studies"
IDIOM = "two observed sites, a correlated pair of local sites"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(41)
    root = np.linalg.cholesky(np.array([[1.0, 0.4], [0.4, 1.0]]))
    trait = rng.standard_normal((40, 2)) @ root.T
    hard, slow = 0.8 * rng.standard_normal(12), 2.0 + 0.3 * rng.standard_normal(12)
    person, item = np.repeat(np.arange(40), 12), np.tile(np.arange(12), 40)
    right = rng.random(480) < 1.0 / (1.0 + np.exp(hard[item] - trait[person, 0]))
    time = slow[item] - 0.3 * trait[person, 1] + 0.4 * rng.standard_normal(480)
    return {"client": person, "item": item, "right": right.astype(float), "time": time}


def model(batch: Any) -> None:
    """A Rasch model of answers and a log-normal one of times."""
    hard = pyro.sample("hard", dist.Normal(torch.zeros(12), 1.5).to_event(1))
    slow = pyro.sample("slow", dist.Normal(torch.zeros(12), 3.0).to_event(1))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    sd = pyro.sample("sd", dist.HalfNormal(torch.ones(2)).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(2, 2.0))
    with batch.clients():
        trait = dist.MultivariateNormal(torch.zeros(2), scale_tril=sd[..., None] * corr)
        trait = pyro.sample("trait", trait)
        with batch.data():
            logits = trait[..., 0] - hard[..., batch.item]
            pyro.sample("right", dist.Bernoulli(logits=logits), obs=batch.right)
            seconds = dist.Normal(slow[..., batch.item] - trait[..., 1], noise)
            pyro.sample("time", seconds, obs=batch.time)
