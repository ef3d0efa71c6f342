"""Answers to five items: an ability of each row, a level of each school."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume I, Lsat, with schools"
IDIOM = "a site a row, a vector of responses"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(11)
    N, n, J = 6, 40, 5
    c = np.repeat(np.arange(N), n)
    th = rng.normal(0, 1, N * n) + rng.normal(0, 0.4, N)[c]
    d = np.linspace(-1, 1, J)
    y = (rng.random((N * n, J)) < 1 / (1 + np.exp(-(th[:, None] - d)))).astype(float)
    return {"client": c, "y": y}


def model(batch: Any) -> None:
    """Abilities of rows about a school's level."""
    d = pyro.sample("d", dist.Normal(torch.zeros(5), 2.0).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(1.0))
    sd = pyro.sample("sd", dist.HalfNormal(1.0))
    with batch.clients():
        m = pyro.sample("m", dist.Normal(0.0, s))
        with batch.data():
            th = pyro.sample("th", dist.Normal(m, sd))
            pyro.sample("y", dist.Bernoulli(logits=th[..., None] - d).to_event(1), obs=batch.y)
