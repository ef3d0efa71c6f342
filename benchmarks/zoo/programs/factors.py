"""Six tests of 80 pupils: two factors of each pupil."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Stan's forum and Pyro's probabilistic PCA"
IDIOM = "a global matrix times a local vector"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(73)
    w = np.array([[1.0, 0.0], [0.8, 0.0], [0.7, 0.3], [0.2, 0.9], [0.0, 1.0], [0.4, 0.6]])
    z = rng.standard_normal((80, 2))
    return {"client": np.arange(80), "y": z @ w.T + 0.5 * rng.standard_normal((80, 6))}


def model(batch: Any) -> None:
    """Loadings can be rotated: there is no single mode."""
    w = pyro.sample("w", dist.Normal(torch.zeros(6, 2), 1.0).to_event(2))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with batch.data():
            loc = (z[..., None, :] * w).sum(-1)
            pyro.sample("y", dist.Normal(loc, sigma).to_event(1), obs=batch.y)
