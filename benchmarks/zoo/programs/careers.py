"""Choices among three careers in twelve families."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking, m11.13"
IDIOM = "Categorical logits, a local vector"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(56)
    income = np.array([1.0, 2.0, 5.0])
    client = np.repeat(np.arange(12), 25)
    u = 0.4 * income + rng.normal(0, 0.5, (12, 3))[client] + rng.gumbel(size=(300, 3))
    return {"client": client, "y": u.argmax(-1)}


def model(batch: Any) -> None:
    """Utilities of income and of each family's taste, the last career's at 0."""
    a = pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0).expand([2]).to_event(1))
    with batch.clients():
        taste = pyro.sample("taste", dist.Normal(a, tau).to_event(1))
        with batch.data():
            zeros = torch.zeros((*taste.shape[:-1], 1))
            pyro.sample("y", dist.Categorical(logits=torch.cat([taste, zeros], -1)), obs=batch.y)
