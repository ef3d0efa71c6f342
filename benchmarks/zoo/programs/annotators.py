"""Five annotators' labels of items at six sites; true classes are summed out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "NumPyro, Bayesian models of annotation, Dawid and Skene"
IDIOM = "row labels, Dirichlet tables"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(32)
    true = rng.choice(3, 150, p=[0.5, 0.3, 0.2])
    table = np.stack([np.full((3, 3), 0.1 + 0.03 * k) for k in range(5)])
    for k in range(5):
        table[k][np.arange(3), np.arange(3)] = 0.8 - 0.06 * k
    y = np.stack([[rng.choice(3, p=table[k, t]) for k in range(5)] for t in true])
    return {"client": np.arange(150) % 6, "y": y}


def model(batch: Any) -> None:
    """Each annotator has a table of confusions; classes are ordered by its diagonal."""
    pi = pyro.sample("pi", dist.Dirichlet(torch.ones(3)))
    prior = 1.0 + 4.0 * torch.eye(3)
    with pyro.plate("annotators", 5, dim=-2), pyro.plate("classes", 3, dim=-1):
        beta = pyro.sample("beta", dist.Dirichlet(prior))
    with batch.clients(), batch.data():
        c = pyro.sample("c", dist.Categorical(pi), infer={"enumerate": "parallel"})
        for k in range(5):
            pyro.sample(f"y_{k}", dist.Categorical(beta[k][c]), obs=batch.y[..., k])
