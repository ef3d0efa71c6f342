"""Whether households of Bangladesh change their well."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "posteriordb, wells_dist100ars"
IDIOM = "no local site, improper uniform priors"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(58)
    x = np.stack([rng.gamma(1.5, 0.33, 600), rng.gamma(2.0, 0.8, 600)], -1)
    y = rng.random(600) < 1 / (1 + np.exp(-(x @ [-0.9, 0.46])))
    return {"client": np.arange(600) % 3, "x": x, "y": y.astype(float)}


def model(batch: Any) -> None:
    """A logistic regression on distance and arsenic."""
    real = dist.constraints.real
    b0 = pyro.sample("b0", dist.ImproperUniform(real, (), ()))
    b1 = pyro.sample("b1", dist.ImproperUniform(real, (), ()))
    b2 = pyro.sample("b2", dist.ImproperUniform(real, (), ()))
    with batch.clients(), batch.data():
        logits = b0 + b1 * batch.x[..., 0] + b2 * batch.x[..., 1]
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)
