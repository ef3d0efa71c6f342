"""Concentrations of a drug in twelve persons: one compartment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "posteriordb, one_comp_mm_elim_abs; nlme, Theophylline"
IDIOM = "nonlinear, local log-normals"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(22)
    t, client = np.tile([0.25, 0.5, 1, 2, 4, 6, 9, 12.0], 12), np.repeat(np.arange(12), 8)
    ka, ke = (
        np.exp(0.4 + 0.4 * rng.standard_normal(12)),
        np.exp(-2.4 + 0.2 * rng.standard_normal(12)),
    )
    ka, ke = ka[client], ke[client]
    c = 9.0 * ka / (ka - ke) * (np.exp(-ke * t) - np.exp(-ka * t))
    return {"client": client, "t": t, "c": c * np.exp(0.15 * rng.standard_normal(96))}


def model(batch: Any) -> None:
    """Rates of absorption and elimination of each person."""
    mu = pyro.sample("mu", dist.Normal(torch.tensor([0.0, -2.0]), 1.0).to_event(1))
    omega = pyro.sample("omega", dist.HalfNormal(0.5 * torch.ones(2)).to_event(1))
    size = pyro.sample("size", dist.LogNormal(2.0, 0.5))
    sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
    with batch.clients():
        k = pyro.sample("k", dist.LogNormal(mu, omega).to_event(1))
        with batch.data():
            ka, ke = k[..., 0], k[..., 1]
            decay = torch.exp(-ke * batch.t) - torch.exp(-ka * batch.t)
            mean = size * ka / (ka - ke) * decay
            pyro.sample("c", dist.LogNormal(torch.log(mean), sigma), obs=batch.c)
