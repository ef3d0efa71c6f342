"""Twelve slopes with a horseshoe prior, without local sites."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "NumPyro, horseshoe regression"
IDIOM = "no local site, heavy tails"
LOGS = ("lambdas", "tau")  # without a variance


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(16)
    x = rng.standard_normal((100, 8))
    y = x @ [1.5, 0, 0, -1.0, 0, 0, 0, 0] + 0.8 * rng.standard_normal(100)
    return {"client": np.arange(100) % 5, "x": x, "y": y}


def model(batch: Any) -> None:
    """Scales of slopes have half-Cauchy priors."""
    lambdas = pyro.sample("lambdas", dist.HalfCauchy(torch.ones(8)).to_event(1))
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    raw = pyro.sample("raw", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    slope = tau * lambdas * raw
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal((batch.x * slope).sum(-1), sigma), obs=batch.y)
