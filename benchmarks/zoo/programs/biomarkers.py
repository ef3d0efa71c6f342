"""A biomarker's line and the time to an event, or to the end, of each of 30 patients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Stan case studies, joint models of longitudinal measures and times to events"
IDIOM = "a factor of a client's fields beside its rows, LKJ"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(11)
    visits = rng.integers(3, 8, 30)
    client, t = np.repeat(np.arange(30), visits), np.concatenate([np.arange(k) / 2 for k in visits])
    line = rng.multivariate_normal([1.0, 0.5], [[0.5, 0.1], [0.1, 0.1]], 30, method="cholesky")
    y = line[client, 0] + line[client, 1] * t + 0.4 * rng.standard_normal(len(t))
    time = rng.exponential(np.exp(1.5 - 0.6 * line[:, 0])).astype(np.float32)
    own = {"time": np.minimum(time, 4.0), "died": (time < 4.0).astype(np.float32)}
    return {"client": client, "t": t, "y": y, "of_clients": own}


def model(batch: Any) -> None:
    """The hazard is constant, and its log linear in the level at the first visit."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 5.0).to_event(1))
    sd = pyro.sample("sd", dist.HalfNormal(torch.ones(2)).to_event(1))
    tril = pyro.sample("tril", dist.LKJCholesky(2, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    base = pyro.sample("base", dist.Normal(0.0, 2.0))
    alpha = pyro.sample("alpha", dist.Normal(0.0, 2.0))
    with batch.clients():
        w = pyro.sample("w", dist.MultivariateNormal(mu, scale_tril=sd[..., None] * tril))
        log_hazard = base + alpha * w[..., 0]
        pyro.factor("event", batch.died * log_hazard - torch.exp(log_hazard) * batch.time)
        with batch.data():
            pyro.sample("y", dist.Normal(w[..., 0] + w[..., 1] * batch.t, sigma), obs=batch.y)
