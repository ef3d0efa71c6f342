"""Votes in five states by eight groups of age and education."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "posteriordb, election88; Gelman and Hill, chapter 14"
IDIOM = "plates of groups outside the clients, codes"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(48)
    client, age, edu = (rng.integers(0, k, 300) for k in (5, 4, 4))
    client = np.sort(client)
    eta = rng.normal(0, 0.4, 5)[client] + rng.normal(0, 0.5, 4)[age] + rng.normal(0, 0.3, 4)[edu]
    y = rng.random(300) < 1 / (1 + np.exp(-eta))
    return {"client": client, "age": age, "edu": edu, "y": y.astype(float)}


def model(batch: Any) -> None:
    """Effects of groups that all states share, each row by its codes."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    s_age = pyro.sample("s_age", dist.HalfNormal(1.0))
    s_edu = pyro.sample("s_edu", dist.HalfNormal(1.0))
    s_state = pyro.sample("s_state", dist.HalfNormal(1.0))
    with pyro.plate("ages", 4):
        a = pyro.sample("a", dist.Normal(0.0, s_age))
    with pyro.plate("educations", 4):
        e = pyro.sample("e", dist.Normal(0.0, s_edu))
    with batch.clients():
        state = pyro.sample("state", dist.Normal(mu, s_state))
        with batch.data():
            logits = state + a[batch.age] + e[batch.edu]
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)
