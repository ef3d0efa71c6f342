"""Roaches caught in apartments of ten buildings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "rstanarm and NumPyro, roaches"
IDIOM = "ZeroInflatedNegativeBinomial"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(55)
    client, treat = np.repeat(np.arange(10), 20), rng.integers(0, 2, 200).astype(float)
    mu = np.exp(2.0 - 0.6 * treat + rng.normal(0, 0.4, 10)[client])
    y = rng.poisson(mu * rng.gamma(1.5, 1 / 1.5, 200)) * (rng.random(200) > 0.2)
    return {"client": client, "treat": treat, "y": y.astype(float)}


def model(batch: Any) -> None:
    """A gate, a dispersion and a level of each building."""
    a = pyro.sample("a", dist.Normal(0.0, 5.0))
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    gate = pyro.sample("gate", dist.Beta(1.0, 4.0))
    phi = pyro.sample("phi", dist.Exponential(0.5))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        building = pyro.sample("building", dist.Normal(0.0, tau))
        with batch.data():
            eta = a + building + b * batch.treat
            y = dist.ZeroInflatedNegativeBinomial(phi, logits=eta - torch.log(phi), gate=gate)
            pyro.sample("y", y, obs=batch.y)
