"""Shares of four foods in what ten lakes' fish ate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume II, Alligators; NumPyro, DirichletMultinomial"
IDIOM = "local Dirichlet sites, Multinomial"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(41)
    p = rng.dirichlet([4.0, 2.0, 1.5, 1.0], 10)
    y = np.stack([rng.multinomial(15, p[k]) for k in np.repeat(np.arange(10), 3)])
    return {"client": np.repeat(np.arange(10), 3), "y": y.astype(float)}


def model(batch: Any) -> None:
    """Shares of each lake about those of all."""
    kappa = pyro.sample("kappa", dist.Gamma(2.0, 0.2))
    pi = pyro.sample("pi", dist.Dirichlet(torch.ones(4)))
    with batch.clients():
        p = pyro.sample("p", dist.Dirichlet(kappa * pi))
        with batch.data():
            pyro.sample("y", dist.Multinomial(total_count=15, probs=p), obs=batch.y)
