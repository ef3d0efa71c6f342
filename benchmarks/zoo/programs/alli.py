"""What alligators of four lakes eat, by size and sex."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume II, Alli"
IDIOM = "Multinomial logits, a local vector"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(73)
    client, size, sex = np.repeat(np.arange(4), 4), np.tile([0, 0, 1, 1], 4), np.tile([0, 1], 8)
    level = np.array([0.0, -1.5, -2.0, -1.8, -0.8]) + 0.5 * rng.standard_normal((4, 5))[client]
    by_size, by_sex = np.array([0.0, 1.4, 0.3, -0.2, 0.0]), np.array([0.0, 0, 0, 0, 0.3])
    odds = np.exp(level + by_size * size[:, None] + by_sex * sex[:, None])
    y = np.stack([rng.multinomial(14, row / row.sum()) for row in odds]).astype(float)
    return {"client": client, "long": size.astype(float), "sex": sex.astype(float), "y": y}


def model(batch: Any) -> None:
    """Logits of four foods against the first, with an effect of each lake."""
    alpha = pyro.sample("alpha", dist.Normal(torch.zeros(4), 10.0).to_event(1))
    by_length = pyro.sample("by_length", dist.Normal(torch.zeros(4), 10.0).to_event(1))
    by_sex = pyro.sample("by_sex", dist.Normal(torch.zeros(4), 10.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        lake = pyro.sample("lake", dist.Normal(torch.zeros(4), tau).to_event(1))
        with batch.data():
            eta = alpha + by_length * batch.long[..., None] + by_sex * batch.sex[..., None] + lake
            logits = torch.cat([torch.zeros_like(eta[..., :1]), eta], -1)
            pyro.sample("y", dist.Multinomial(14, logits=logits), obs=batch.y)
