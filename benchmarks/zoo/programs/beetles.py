"""Beetles killed at eight doses: a complementary log-log link."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume II, Beetles"
IDIOM = "no local site"


def rows() -> dict[str, Any]:
    """Return the rows."""
    x = [1.6907, 1.7242, 1.7552, 1.7842, 1.8113, 1.8369, 1.8610, 1.8839]
    n, r = [59.0, 60, 62, 56, 63, 59, 62, 60], [6.0, 13, 18, 28, 52, 53, 61, 60]
    return {"client": np.arange(8) % 2, "x": np.array(x), "n": np.array(n), "r": np.array(r)}


def model(batch: Any) -> None:
    """Probabilities 1 - exp(-exp(eta))."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 100.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 100.0))
    with batch.clients(), batch.data():
        p = 1.0 - torch.exp(-torch.exp(alpha + beta * (batch.x - 1.8)))
        pyro.sample("r", dist.Binomial(batch.n, p), obs=batch.r)
