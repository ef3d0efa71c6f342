"""Skeletal ages of 13 boys by graded indicators with known cuts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "BUGS volume I, Bones"
IDIOM = "no global site, indicators with known cuts"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(43)
    age = np.linspace(0.6, 16.0, 13)
    client, item = np.repeat(np.arange(13), 12), np.tile(np.arange(12), 13)
    cut, slope = np.linspace(1.0, 15.0, 12)[item], np.tile([1.5, 2.5, 1.0], 52)
    y = rng.random(156) < 1 / (1 + np.exp(-slope * (age[client] - cut)))
    return {"client": client, "cut": cut, "slope": slope, "y": y.astype(float)}


def model(batch: Any) -> None:
    """Only an age of each boy is unknown."""
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 1000.0**0.5))
        with batch.data():
            logits = batch.slope * (theta - batch.cut)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)
