"""A local level of each of seven series, by a loop over its states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "posteriordb, state_space_stochastic_level; Stan's uk_drivers"
IDIOM = "a state of each step given the one before, a loop"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(33)
    level = 0.3 * rng.standard_normal((7, 20)).cumsum(1) + 2.0 + rng.standard_normal((7, 1))
    return {"client": np.arange(7), "y": level + 0.4 * rng.standard_normal((7, 20))}


def model(batch: Any) -> None:
    """Random walks that are seen with noise."""
    move = pyro.sample("move", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = pyro.sample("spread", dist.HalfNormal(2.0))
    with batch.clients():
        levels = [pyro.sample("level_0", dist.Normal(mean, spread))]
        for t in range(1, 20):
            levels.append(pyro.sample(f"level_{t}", dist.Normal(levels[-1], move)))
        with batch.data():
            seen = dist.Normal(torch.stack(levels, -1), noise).to_event(1)
            pyro.sample("y", seen, obs=batch.y)
