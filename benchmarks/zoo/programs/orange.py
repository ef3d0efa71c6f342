"""Growth of five orange trees: logistic curves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume II, Otrees"
IDIOM = "nonlinear, three local sites"


def rows() -> dict[str, Any]:
    """Return the rows."""
    x = np.tile([118.0, 484, 664, 1004, 1231, 1372, 1582], 5)
    y = [30.0, 58, 87, 115, 120, 142, 145, 33, 69, 111, 156, 172, 203, 203, 30, 51, 75, 108, 115]
    y += [139, 140, 32, 62, 112, 167, 179, 209, 214, 30, 49, 81, 125, 142, 174, 177]
    return {"client": np.repeat(np.arange(5), 7), "x": x / 1000, "y": np.array(y)}


def model(batch: Any) -> None:
    """Three parameters of a logistic curve for each tree."""
    mu = pyro.sample("mu", dist.Normal(torch.tensor([5.0, 1.0, 1.0]), 2.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(0.5 * torch.ones(3)).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(10.0))
    with batch.clients():
        phi = pyro.sample("phi", dist.Normal(mu, tau).to_event(1))
        with batch.data():
            down = 1.0 + torch.exp(phi[..., 1] - torch.exp(phi[..., 2]) * batch.x)
            pyro.sample("y", dist.Normal(torch.exp(phi[..., 0]) / down, sigma), obs=batch.y)
