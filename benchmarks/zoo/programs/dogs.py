"""Dogs learn to avoid a shock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume I, Dogs; Pyro's tutorial"
IDIOM = "no local site, probabilities by exp"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(5)
    y, avoided, shocked = np.ones((30, 25)), np.zeros((30, 25)), np.zeros((30, 25))
    for t in range(1, 25):
        avoided[:, t], shocked[:, t] = (1 - y[:, :t]).sum(1), y[:, :t].sum(1)
        y[:, t] = rng.random(30) < np.exp(-0.24 * avoided[:, t] - 0.08 * shocked[:, t])
    client = np.repeat(np.arange(30), 24)
    names = {"y": y, "avoided": avoided, "shocked": shocked}
    return {"client": client, **{name: v[:, 1:].ravel() for name, v in names.items()}}


def model(batch: Any) -> None:
    """The log probability of a shock falls with each trial."""
    alpha = pyro.sample("alpha", dist.HalfNormal(316.0))
    beta = pyro.sample("beta", dist.HalfNormal(316.0))
    with batch.clients(), batch.data():
        log_p = -(alpha + 1e-5) * batch.avoided - (beta + 1e-5) * batch.shocked
        pyro.sample("y", dist.Bernoulli(torch.exp(log_p)), obs=batch.y)
