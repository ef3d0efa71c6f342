"""Admissions of twelve departments: correlated effects of gender."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "NumPyro, ucbadmit"
IDIOM = "correlated effects, two rows a client"


def rows() -> dict[str, Any]:
    """Return the rows."""
    apps = [825.0, 108, 560, 25, 325, 593, 417, 375, 191, 393, 373, 341]
    admit = [512.0, 89, 353, 17, 120, 202, 138, 131, 53, 94, 22, 24]
    male = np.tile([1.0, 0.0], 6)
    client = np.repeat(np.arange(6), 2)
    return {"client": client, "male": male, "n": np.array(apps), "admit": np.array(admit)}


def model(batch: Any) -> None:
    """An intercept and an effect of being male for each department."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), torch.tensor([10.0, 1.0])).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.0 * torch.ones(2)).to_event(1))
    rho = pyro.sample("rho", dist.LKJCholesky(2, 2.0))
    with batch.clients():
        ab = pyro.sample("ab", dist.MultivariateNormal(mu, scale_tril=sigma[..., None] * rho))
        with batch.data():
            eta = ab[..., 0] + ab[..., 1] * batch.male
            pyro.sample("admit", dist.Binomial(batch.n, logits=eta), obs=batch.admit)
