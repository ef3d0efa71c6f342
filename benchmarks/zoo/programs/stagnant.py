"""Two lines that meet where the flow of water changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume II, Stagnant"
IDIOM = "a change point, vague priors"


def rows() -> dict[str, Any]:
    """Return the rows."""
    x = [-1.39, -1.39, -1.08, -1.08, -0.94, -0.8, -0.63, -0.63, -0.25, -0.25, -0.12, -0.12, 0.01]
    x += [0.11, 0.11, 0.11, 0.25, 0.25, 0.34, 0.34, 0.44, 0.59, 0.7, 0.7, 0.85, 0.85, 0.99, 0.99]
    y = [1.12, 1.12, 0.99, 1.03, 0.92, 0.9, 0.81, 0.83, 0.65, 0.67, 0.6, 0.59, 0.51, 0.44, 0.43]
    y += [0.43, 0.33, 0.3, 0.25, 0.24, 0.13, -0.01, -0.13, -0.14, -0.3, -0.33, -0.46, -0.43]
    return {"client": np.arange(28) % 3, "x": np.array(x), "y": np.array(y)}


def model(batch: Any) -> None:
    """The slope changes at a point that is unknown."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 1000.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1000.0).to_event(1))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    change = pyro.sample("change", dist.Uniform(-1.3, 1.1))
    with batch.clients(), batch.data():
        slope = torch.where(batch.x > change, beta[1], beta[0])
        pyro.sample("y", dist.Normal(alpha + slope * (batch.x - change), tau**-0.5), obs=batch.y)
