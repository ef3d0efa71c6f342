"""A Bayesian network of one hidden layer of four units, with an intercept of each of eight clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "NumPyro, Bayesian neural network"
IDIOM = "hidden units that may be exchanged, a local shift"
UNITS = 4


def rows() -> dict[str, Any]:
    """Return the rows: a sine about each client's own shift."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, 240)
    own = np.repeat(0.3 * rng.standard_normal(8), 30)
    y = np.sin(1.5 * x) + own + 0.2 * rng.standard_normal(len(x))
    return {"client": np.repeat(np.arange(8), 30), "x": x, "y": y}


def model(batch: Any) -> None:
    """Rows about a sum of hyperbolic tangents."""
    slope, bias, out = (
        pyro.sample(n, dist.Normal(torch.zeros(UNITS), 1.0).to_event(1))[..., None, :]
        for n in ("slope", "bias", "out")
    )
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with batch.clients():
        shift = pyro.sample("shift", dist.Normal(0.0, spread))
        with batch.data():
            hidden = torch.tanh(slope * batch.x[..., None] + bias)
            loc = shift + (hidden * out).sum(-1)
            pyro.sample("y", dist.Normal(loc, noise), obs=batch.y)
