"""Accidents of six mines over 30 years, each with a change at a year of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "PyMC's and Pyro's coal mining disasters, by mine"
IDIOM = "a local Categorical over columns"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(66)
    change = rng.integers(8, 22, 6)
    rate = np.where(np.arange(30) < change[:, None], 3.0, 1.0)
    return {"client": np.arange(6), "y": rng.poisson(rate).astype(float)}


def model(batch: Any) -> None:
    """The year of a mine's change is summed out."""
    early = pyro.sample("early", dist.Exponential(0.5))
    late = pyro.sample("late", dist.Exponential(0.5))
    with batch.clients():
        year = pyro.sample("year", dist.Categorical(torch.ones(30) / 30.0))
        with batch.data():
            rate = torch.where(torch.arange(30) < year[..., None], early, late)
            pyro.sample("y", dist.Poisson(rate).to_event(1), obs=batch.y)
