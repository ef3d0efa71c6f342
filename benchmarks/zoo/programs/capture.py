"""Recaptures of birds at three places: Cormack, Jolly and Seber's model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Pyro and NumPyro, capture_recapture (CJS)"
IDIOM = "hidden chains by row, pyro.markov"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(33)
    alive, caught = np.ones(90, dtype=bool), [np.ones(90)]
    for _ in range(5):
        alive &= rng.random(90) < 0.75
        caught.append((alive & (rng.random(90) < 0.5)).astype(float))
    return {"client": np.arange(90) % 3, "caught": np.stack(caught, -1)}


def model(batch: Any) -> None:
    """Survival and a place's chance of recapture."""
    phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.5))
    with batch.clients():
        logit = pyro.sample("logit", dist.Normal(mu, 0.5))
        with batch.data():
            z = torch.ones(())
            for t in pyro.markov(range(1, 6)):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(phi * z))
                seen = dist.Bernoulli(torch.sigmoid(logit) * z)
                pyro.sample(f"y_{t}", seen, obs=batch.caught[..., t])


def for_numpyro(batch: Any) -> None:
    """The same, with the chain summed out by hand: a bird not caught again may be alive or not."""
    phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.5))
    with batch.clients():
        logit = pyro.sample("logit", dist.Normal(mu, 0.5))
        p = torch.sigmoid(logit)
        with batch.data():
            alive, dead = torch.ones((1, 1)), torch.zeros((1, 1))
            for t in range(1, 6):
                caught = batch.caught[..., t]
                dead = (dead + alive * (1 - phi)) * (1 - caught)
                alive = alive * phi * torch.where(caught > 0, p, 1 - p)
            pyro.factor("caught", torch.log(alive + dead))
