"""Reported cases of fifteen days in six cities: susceptible, infected, recovered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Pyro, epidemiological models; Stan case study on SIR"
IDIOM = "a compartment model, a loop over days"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(11)
    rate = np.exp(0.8 + 0.2 * rng.normal(size=6))
    susceptible, infected, y = np.full(6, 990.0), np.full(6, 10.0), np.zeros((6, 15))
    for t in range(15):
        new = susceptible * (1 - np.exp(-rate / 4 * infected / 1000))
        susceptible, infected = susceptible - new, infected + new - infected / 4
        y[:, t] = rng.poisson(0.4 * new)
    return {"client": np.arange(6), "y": y}


def model(batch: Any) -> None:
    """Each city has its reproduction number; the share that is reported is common."""
    mu = pyro.sample("mu", dist.Normal(0.5, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    rho = pyro.sample("rho", dist.Beta(2.0, 2.0))
    recovery = pyro.sample("recovery", dist.LogNormal(1.4, 0.3))
    with batch.clients():
        rate = pyro.sample("rate", dist.LogNormal(mu, tau))
        with batch.data():
            susceptible, infected = 990.0, 10.0
            for t in range(15):
                new = susceptible * (1 - torch.exp(-rate / recovery * infected / 1000.0))
                susceptible = susceptible - new
                infected = infected + new - infected / recovery
                pyro.sample(f"y_{t}", dist.Poisson(rho * new), obs=batch.y[..., t])
