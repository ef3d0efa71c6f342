"""Beats of a heart before and after a drug, which cures some of twelve patients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume II, Hearts"
IDIOM = "kinds of clients, one row each"


def rows() -> dict[str, Any]:
    """Return the rows."""
    x = np.array([6.0, 9, 17, 22, 7, 5, 5, 14, 9, 7, 9, 51])
    y = np.array([5.0, 2, 0, 0, 2, 1, 0, 0, 0, 0, 13, 0])
    return {"client": np.arange(12), "y": y, "t": x + y}


def model(batch: Any) -> None:
    """A patient who is cured has no more beats."""
    theta = pyro.sample("theta", dist.Beta(1.0, 1.0))
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with batch.clients():
        cured = pyro.sample("cured", dist.Bernoulli(theta), infer={"enumerate": "parallel"})
        with batch.data():
            chance = torch.where(cured == 1, torch.tensor(1e-6), p)
            pyro.sample("y", dist.Binomial(batch.t, probs=chance), obs=batch.y)
