"""A test of 60 persons on six graded items."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "posteriordb, grsm; edstan, rating scale"
IDIOM = "a local trait, a global table of cuts"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(71)
    theta = rng.standard_normal(60)
    cuts = np.sort(rng.normal(0, 1.2, (6, 3)), -1)
    client, item = np.repeat(np.arange(60), 6), np.tile(np.arange(6), 60)
    y = (theta[client][:, None] + rng.logistic(size=(360, 1)) > cuts[item]).sum(-1)
    return {"client": client, "item": item, "y": y}


def model(batch: Any) -> None:
    """Each row picks the ordered cuts of its item."""
    first = pyro.sample("first", dist.Normal(torch.zeros(6), 2.0).to_event(1))
    steps = pyro.sample("steps", dist.LogNormal(torch.zeros(6, 2), 1.0).to_event(2))
    cuts = torch.cat([first[:, None], first[:, None] + torch.cumsum(steps, -1)], -1)
    spread = pyro.sample("spread", dist.HalfNormal(2.0))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, spread))
        with batch.data():
            pyro.sample(
                "y", dist.OrderedLogistic(theta + 0.0 * batch.y, cuts[batch.item]), obs=batch.y
            )
