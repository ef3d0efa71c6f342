"""Exam scores of 15 pupils, of whom some guess."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Lee and Wagenmakers, Bayesian Cognitive Modeling, Exam scores"
IDIOM = "kinds of clients, a Beta of one kind"


def rows() -> dict[str, Any]:
    """Return the rows."""
    k = np.array([21.0, 17, 21, 18, 22, 31, 31, 34, 34, 35, 35, 36, 39, 36, 35])
    return {"client": np.arange(15), "k": k}


def model(batch: Any) -> None:
    """A pupil guesses, or knows."""
    phi = pyro.sample("phi", dist.Uniform(0.5, 1.0))
    with batch.clients():
        z = pyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        with batch.data():
            theta = torch.where(z == 1.0, phi, torch.tensor(0.5))
            pyro.sample("k", dist.Binomial(40, theta), obs=batch.k)
