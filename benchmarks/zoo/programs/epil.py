"""Seizures of 59 patients at four visits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume I, Epil"
IDIOM = "a site a row beside a local site"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(1)
    base, trt = rng.gamma(2.0, 4.0, 59).round() + 4, rng.integers(0, 2, 59)
    x = np.repeat(np.stack([np.log(base / 4) - 1, trt - 0.5], -1), 4, axis=0)
    b = np.repeat(0.5 * rng.standard_normal(59), 4) + 0.35 * rng.standard_normal(236)
    y = rng.poisson(np.exp(1.6 + x @ [0.9, -0.4] + b))
    return {"client": np.repeat(np.arange(59), 4), "x": x, "y": y.astype(float)}


def model(batch: Any) -> None:
    """Counts with an effect of each patient and of each visit."""
    a0 = pyro.sample("a0", dist.Normal(0.0, 10.0))
    a = pyro.sample("a", dist.Normal(torch.zeros(2), 10.0).to_event(1))
    s1 = pyro.sample("s1", dist.HalfCauchy(1.0))
    s = pyro.sample("s", dist.HalfCauchy(1.0))
    with batch.clients():
        b1 = pyro.sample("b1", dist.Normal(0.0, s1))
        with batch.data():
            b = pyro.sample("b", dist.Normal(0.0, s))
            eta = a0 + (batch.x * a).sum(-1) + b1 + b
            pyro.sample("y", dist.Poisson(torch.exp(eta)), obs=batch.y)
