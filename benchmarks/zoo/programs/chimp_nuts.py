"""Nuts that chimpanzees open: a curve of strength over age, and each animal's own skill."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking, chapter 16"
IDIOM = "a nonlinear rate with known form"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(4)
    N, n = 20, 4
    c = np.repeat(np.arange(N), n)
    age = np.repeat(rng.uniform(0.15, 1, N), n)
    sec = rng.uniform(5, 60, N * n)
    phi = np.exp(rng.normal(0, 0.4, N))[c]
    lam = sec * phi * (1 - np.exp(-4 * age)) ** 6
    return {"client": c, "age": age, "seconds": sec, "n": rng.poisson(lam).astype(float)}


def model(batch: Any) -> None:
    """Rates of opening grow with age, and differ by animal."""
    phi = pyro.sample("phi", dist.LogNormal(np.log(1.0), 0.3))
    k = pyro.sample("k", dist.LogNormal(np.log(2.0), 0.5))
    th = pyro.sample("th", dist.LogNormal(np.log(5.0), 0.5))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    with batch.clients():
        v = pyro.sample("v", dist.Normal(0.0, 1.0))
        with batch.data():
            lam = batch.seconds * phi * torch.exp(v * sigma) * (1 - torch.exp(-k * batch.age)) ** th
            pyro.sample("n", dist.Poisson(lam), obs=batch.n)
