"""Two hidden states of ten series of 20 numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "posteriordb, hmm_example; Pyro's hmm.py, model_1"
IDIOM = "a hidden Markov chain a row"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(34)
    state, steps = rng.integers(0, 2, 10), []
    for _ in range(20):
        stay = rng.random(10) < np.where(state == 0, 0.7, 0.8)
        state = np.where(stay, state, 1 - state)
        steps.append(np.where(state == 0, 3.0, 9.0) + rng.standard_normal(10))
    return {"client": np.arange(10), "y": np.stack(steps, -1)}


def model(batch: Any) -> None:
    """Rows of a transition matrix, and means ordered by a positive step."""
    theta = pyro.sample("theta", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    low = pyro.sample("low", dist.Normal(3.0, 1.0))
    step = pyro.sample("step", dist.LogNormal(1.5, 0.5))
    with batch.clients(), batch.data():
        z = torch.zeros((), dtype=torch.long)
        for t in pyro.markov(range(20)):
            z = pyro.sample(f"z_{t}", dist.Categorical(theta[z]))
            pyro.sample(f"y_{t}", dist.Normal(low + step * z, 1.0), obs=batch.y[..., t])
