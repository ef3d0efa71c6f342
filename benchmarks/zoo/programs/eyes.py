"""Peak sensitivity of 48 eyes: a mixture of two Normals by rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "BUGS volume II, Eyes"
IDIOM = "row labels"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(6)
    of_second = rng.random(48) < 0.4
    y = np.where(of_second, 548.0, 536.0) + 3.5 * rng.standard_normal(48)
    return {"client": np.arange(48) % 4, "y": y - 540.0}


def model(batch: Any) -> None:
    """Two kinds of eyes, ordered by a positive difference."""
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    low = pyro.sample("low", dist.Normal(0.0, 30.0))
    step = pyro.sample("step", dist.HalfNormal(30.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(5.0))
    with batch.clients(), batch.data():
        kind = pyro.sample("kind", dist.Bernoulli(p), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(low + step * kind, sigma), obs=batch.y)
