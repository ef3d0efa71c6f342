"""Two tablets in ten people, crossed over two periods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume I, Equiv"
IDIOM = "vague priors, deterministic sites"


def rows() -> dict[str, Any]:
    """Return the rows."""
    first = [1.40, 1.64, 1.44, 1.36, 1.65, 1.08, 1.09, 1.25, 1.25, 1.30]
    second = [1.65, 1.57, 1.58, 1.68, 1.69, 1.31, 1.43, 1.44, 1.39, 1.52]
    period = np.tile([1.0, -1.0], 10)
    treat = np.repeat([1, 1, -1, -1, -1, 1, 1, 1, -1, -1], 2) * period
    y = np.stack([first, second], 1).ravel()
    return {"client": np.repeat(np.arange(10), 2), "treat": treat, "period": period, "y": y}


def model(batch: Any) -> None:
    """The ratio of both tablets is deterministic."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1000.0))
    phi = pyro.sample("phi", dist.Normal(0.0, 1000.0))
    pi = pyro.sample("pi", dist.Normal(0.0, 1000.0))
    tau1 = pyro.sample("tau1", dist.Gamma(0.001, 0.001))
    tau2 = pyro.sample("tau2", dist.Gamma(0.001, 0.001))
    pyro.deterministic("theta", torch.exp(phi))
    with batch.clients():
        delta = pyro.sample("delta", dist.Normal(0.0, tau2**-0.5))
        with batch.data():
            m = mu + phi / 2 * batch.treat + pi / 2 * batch.period + delta
            pyro.sample("y", dist.Normal(m, tau1**-0.5), obs=batch.y)
