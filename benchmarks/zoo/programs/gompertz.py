"""Growth by Gompertz's curve: three correlated numbers of each client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "brms, nonlinear growth"
IDIOM = "a nonlinear mean, a local vector with LKJ"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(8)
    N, n = 15, 9
    c = np.repeat(np.arange(N), n)
    t = np.tile(np.linspace(0, 4, n), N)
    A = np.exp(rng.normal(1.0, 0.2, N))[c]
    B = np.exp(rng.normal(0.7, 0.2, N))[c]
    C = np.exp(rng.normal(0.1, 0.2, N))[c]
    return {
        "client": c,
        "t": t,
        "y": A * np.exp(-B * np.exp(-C * t)) + 0.1 * rng.normal(size=N * n),
    }


def model(batch: Any) -> None:
    """An asymptote, a displacement and a rate of each client, all positive."""
    mu = pyro.sample("mu", dist.Normal(torch.tensor([1.0, 0.5, 0.0]), 1.0).to_event(1))
    sd = pyro.sample("sd", dist.HalfNormal(torch.full((3,), 0.5)).to_event(1))
    L = pyro.sample("L", dist.LKJCholesky(3, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
    with batch.clients():
        th = pyro.sample("th", dist.MultivariateNormal(mu, scale_tril=sd[..., None] * L))
        with batch.data():
            A, B, C = th[..., 0].exp(), th[..., 1].exp(), th[..., 2].exp()
            pyro.sample(
                "y", dist.Normal(A * torch.exp(-B * torch.exp(-C * batch.t)), sigma), obs=batch.y
            )
