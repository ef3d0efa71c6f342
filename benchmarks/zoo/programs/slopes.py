"""Eight slopes with a horseshoe prior, Gaussian rows, and a shift of each of twelve clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "NumPyro, horseshoe regression, with an intercept of each group"
IDIOM = "a horseshoe of global slopes beside a local shift"
LOGS = ("own", "tau")  # without a variance


def rows() -> dict[str, Any]:
    """Return the rows: two slopes of eight are not 0."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((480, 8))
    shift = np.repeat(0.5 * rng.standard_normal(12), 40)
    y = x[:, :2] @ [1.0, -0.6] + shift + rng.standard_normal(len(x))
    return {"client": np.repeat(np.arange(12), 40), "x": x, "y": y}


def model(batch: Any) -> None:
    """Shifts are Normal."""
    observe(batch, centered(), dist.Normal)


def for_numpyro(batch: Any) -> None:
    """The same: NUTS draws slopes as standard Normal ones."""
    observe(batch, non_centered(), dist.Normal)


def centered() -> Any:
    """Sample the slopes."""
    return pyro.sample("slope", dist.Normal(0.0, scales()).to_event(1))


def non_centered() -> Any:
    """Sample the slopes as standard Normal numbers."""
    scale = scales()
    raw = pyro.sample("raw", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    return pyro.deterministic("slope", scale * raw)


def scales() -> Any:
    """Sample the scale that slopes share, and their own; return the products."""
    tau = pyro.sample("tau", dist.HalfCauchy(0.1))[..., None]
    return tau * pyro.sample("own", dist.HalfCauchy(torch.ones(8)).to_event(1))


def observe(batch: Any, slope: Any, family: Any) -> None:
    """Sample the shifts, by a family of (location, scale), and the rows."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    spread, noise = (pyro.sample(n, dist.HalfNormal(1.0)) for n in ("spread", "noise"))
    with batch.clients():
        shift = pyro.sample("shift", family(mu, spread))
        with batch.data():
            loc = shift + (batch.x * slope[..., None, :]).sum(-1)
            pyro.sample("y", dist.Normal(loc, noise), obs=batch.y)
