"""Lines of six laboratories, with outliers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "brms and PyMC, robust regression"
IDIOM = "Student's t with unknown degrees of freedom"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(54)
    client, x = np.repeat(np.arange(6), 20), rng.standard_normal(120)
    y = 1.0 + 0.5 * x + rng.normal(0, 0.5, 6)[client] + 0.4 * rng.standard_t(3, 120)
    return {"client": client, "x": x, "y": y}


def model(batch: Any) -> None:
    """Degrees of freedom are at least 1."""
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        level = pyro.sample("level", dist.Normal(a, tau))
        with batch.data():
            pyro.sample("y", dist.StudentT(nu + 1.0, level + b * batch.x, sigma), obs=batch.y)
