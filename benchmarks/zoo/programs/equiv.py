"""Two drugs in ten patients, crossed over two periods."""

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
    rng = np.random.default_rng(44)
    client, period = np.repeat(np.arange(10), 2), np.tile([1.0, -1.0], 10)
    treat = np.where(client < 5, period, -period)
    y = 1.4 - 0.1 * treat / 2 - 0.2 * period / 2 + np.repeat(rng.normal(0, 0.14, 10), 2)
    return {"client": client, "treat": treat, "period": period, "y": y + rng.normal(0, 0.1, 20)}


def model(batch: Any) -> None:
    """The ratio of both drugs is deterministic."""
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
