"""Hits and false alarms of 20 people."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Lee and Wagenmakers, Signal detection theory, hierarchical"
IDIOM = "two observed sites, deterministic locals"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(62)
    d, c = rng.normal(1.2, 0.5, 20), rng.normal(0.1, 0.3, 20)
    p = 1 / (1 + np.exp(-1.7 * np.stack([d / 2 - c, -d / 2 - c], -1)))
    return {"client": np.arange(20), "y": rng.binomial(40, p).astype(float)}


def model(batch: Any) -> None:
    """Discriminability and bias of each person, by the Normal's distribution function."""
    mu_d = pyro.sample("mu_d", dist.Normal(0.0, 2.0))
    mu_c = pyro.sample("mu_c", dist.Normal(0.0, 2.0))
    s_d = pyro.sample("s_d", dist.HalfNormal(1.0))
    s_c = pyro.sample("s_c", dist.HalfNormal(1.0))
    with batch.clients():
        d = pyro.sample("d", dist.Normal(mu_d, s_d))
        c = pyro.sample("c", dist.Normal(mu_c, s_c))
        hit = pyro.deterministic("hit", 0.5 + 0.5 * torch.erf((d / 2 - c) / 2.0**0.5))
        alarm = pyro.deterministic("alarm", 0.5 + 0.5 * torch.erf((-d / 2 - c) / 2.0**0.5))
        with batch.data():
            pyro.sample("hits", dist.Binomial(40, hit), obs=batch.y[..., 0])
            pyro.sample("alarms", dist.Binomial(40, alarm), obs=batch.y[..., 1])
