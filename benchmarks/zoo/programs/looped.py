"""Five seasons' effects, each sampled in a loop of Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Pyro's introduction, sequential plates"
IDIOM = "looped scalar sites"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(52)
    client, season = np.repeat(np.arange(9), 15), np.tile(np.arange(5), 27)
    y = (
        rng.normal(0, 0.7, 5)[season]
        + rng.normal(0, 0.4, 9)[client]
        + 0.5 * rng.standard_normal(135)
    )
    return {"client": client, "season": season, "y": y}


def model(batch: Any) -> None:
    """Sites of a sequential plate, stacked."""
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    s = pyro.sample("s", dist.HalfNormal(1.0))
    effects = [pyro.sample(f"season_{k}", dist.Normal(0.0, s)) for k in pyro.plate("seasons", 5)]
    with batch.clients():
        b = pyro.sample("b", dist.Normal(0.0, tau))
        with batch.data():
            loc = torch.stack(effects)[batch.season] + b
            pyro.sample("y", dist.Normal(loc, 0.5), obs=batch.y)


def for_numpyro(batch: Any) -> None:
    """The same: a plate of NumPyro is no loop."""
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    s = pyro.sample("s", dist.HalfNormal(1.0))
    effects = [pyro.sample(f"season_{k}", dist.Normal(0.0, s)) for k in range(5)]
    with batch.clients():
        b = pyro.sample("b", dist.Normal(0.0, tau))
        with batch.data():
            loc = torch.stack(effects)[batch.season] + b
            pyro.sample("y", dist.Normal(loc, 0.5), obs=batch.y)
