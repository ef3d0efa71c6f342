"""A mixture of two regressions, all sites marked by a decorator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import config_enumerate

SOURCE = "Pyro's tutorials, config_enumerate"
IDIOM = "config_enumerate"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(74)
    client, x = np.repeat(np.arange(5), 30), rng.standard_normal(150)
    second = rng.random(150) < 0.4
    y = np.where(second, 2.0 - 1.0 * x, 0.5 * x) + 0.4 * rng.standard_normal(150)
    return {"client": client, "x": x, "y": y}


@config_enumerate
def model(batch: Any) -> None:
    """Intercepts of the two lines are ordered by a positive step."""
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    step = pyro.sample("step", dist.HalfNormal(3.0))
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients(), batch.data():
        k = pyro.sample("k", dist.Categorical(torch.stack([1.0 - p, p], -1)))
        loc = a + step * k + b[k] * batch.x
        pyro.sample("y", dist.Normal(loc, sigma), obs=batch.y)
