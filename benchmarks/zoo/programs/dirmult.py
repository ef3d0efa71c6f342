"""Counts of three kinds, more spread than a Multinomial's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Pyro's distributions, DirichletMultinomial; NumPyro forum"
IDIOM = "DirichletMultinomial, no local site"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(83)
    y = np.stack([rng.multinomial(20, p) for p in rng.dirichlet([3, 2, 1], 25)])
    return {"client": np.arange(25) // 5, "y": y.astype(float)}


def model(batch: Any) -> None:
    """Concentrations of all rows."""
    conc = pyro.sample("conc", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.DirichletMultinomial(conc, total_count=20), obs=batch.y)
