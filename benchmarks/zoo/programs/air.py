"""Respiratory illness and a pollutant measured with error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "BUGS volume II, Air"
IDIOM = "a site a row, measurement error"


def rows() -> dict[str, Any]:
    """Return the rows."""
    y, n = [21.0, 20, 15], [48.0, 34, 21]
    return {
        "client": np.arange(3),
        "z": np.array([10.0, 30, 50]),
        "y": np.array(y),
        "n": np.array(n),
    }


def model(batch: Any) -> None:
    """True exposure, given its measurement."""
    theta1 = pyro.sample("theta1", dist.Normal(0.0, 3.0))
    theta2 = pyro.sample("theta2", dist.Normal(0.0, 0.5))
    with batch.clients(), batch.data():
        exposure = pyro.sample("exposure", dist.Normal(4.48 + 0.76 * batch.z, 9.0))
        pyro.sample("y", dist.Binomial(batch.n, logits=theta1 + theta2 * exposure), obs=batch.y)
