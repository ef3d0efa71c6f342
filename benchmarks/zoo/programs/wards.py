"""Satisfaction of patients in four wards of each of eight hospitals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking and Pyro's forum, three levels"
IDIOM = "a plate within a client"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(51)
    client, ward = np.repeat(np.arange(8), 24), np.tile(np.repeat(np.arange(4), 6), 8)
    level = rng.normal(0, 0.6, 8)[client] + rng.normal(0, 0.4, (8, 4))[client, ward]
    return {"client": client, "ward": ward, "y": 5.0 + level + 0.8 * rng.standard_normal(192)}


def model(batch: Any) -> None:
    """Hospitals about all, wards about their hospital."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    s_h = pyro.sample("s_h", dist.HalfNormal(1.0))
    s_w = pyro.sample("s_w", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        hospital = pyro.sample("hospital", dist.Normal(mu, s_h))
        with pyro.plate("wards", 4, dim=-3):
            ward = pyro.sample("ward", dist.Normal(hospital, s_w))
        with batch.data():
            chosen = torch.arange(4)[:, None, None] == batch.ward
            loc = torch.where(chosen, ward, 0.0).sum(0)
            pyro.sample("y", dist.Normal(loc, sigma), obs=batch.y)
