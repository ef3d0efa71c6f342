"""Germination of seeds on 21 plates, a row each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "BUGS volume I, Seeds"
IDIOM = "one row a client, vague priors"
LOGS = ("tau",)  # its variance rests on few draws


def rows() -> dict[str, Any]:
    """Return the rows."""
    r = [10.0, 23, 23, 26, 17, 5, 53, 55, 32, 46, 10, 8, 10, 8, 23, 0, 3, 22, 15, 32, 3]
    n = [39.0, 62, 81, 51, 39, 6, 74, 72, 51, 79, 13, 16, 30, 28, 45, 4, 12, 41, 30, 51, 7]
    x1 = np.repeat([0.0, 1.0], [11, 10])
    x2 = np.array([0.0] * 5 + [1.0] * 6 + [0.0] * 5 + [1.0] * 5)
    return {"client": np.arange(21), "r": np.array(r), "n": np.array(n), "x1": x1, "x2": x2}


def model(batch: Any) -> None:
    """Logistic regression with an effect of each plate."""
    a0 = pyro.sample("a0", dist.Normal(0.0, 1000.0))
    a1 = pyro.sample("a1", dist.Normal(0.0, 1000.0))
    a2 = pyro.sample("a2", dist.Normal(0.0, 1000.0))
    a12 = pyro.sample("a12", dist.Normal(0.0, 1000.0))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    with batch.clients():
        b = pyro.sample("b", dist.Normal(0.0, tau**-0.5))
        with batch.data():
            eta = a0 + a1 * batch.x1 + a2 * batch.x2 + a12 * batch.x1 * batch.x2 + b
            pyro.sample("r", dist.Binomial(batch.n, logits=eta), obs=batch.r)
