"""Positions of eight animals, measured with noise: a linear dynamic system."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Pyro's documentation of GaussianHMM; posteriordb, state-space models"
IDIOM = "GaussianHMM"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(70)
    z = np.cumsum(0.4 * rng.standard_normal((8, 25)), -1)
    return {"client": np.arange(8), "y": (z + 0.6 * rng.standard_normal((8, 25)))[..., None]}


def model(batch: Any) -> None:
    """Noise of steps and of measurements; positions are integrated out."""
    q = pyro.sample("q", dist.HalfNormal(1.0))
    r = pyro.sample("r", dist.HalfNormal(1.0))
    one, zero = torch.eye(1), torch.zeros(1)
    init = dist.Normal(zero, 1.0).to_event(1)
    step = dist.Normal(zero, q * torch.ones(1)).to_event(1)
    seen = dist.Normal(zero, r * torch.ones(1)).to_event(1)
    with batch.clients(), batch.data():
        hmm = dist.GaussianHMM(init, one, step, one, seen, duration=25)
        pyro.sample("y", hmm, obs=batch.y)
