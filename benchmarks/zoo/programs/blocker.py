"""Beta-blockers in 22 trials: a meta-analysis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "BUGS volume I, Blocker"
IDIOM = "a local site with a flat prior"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rt = [3.0, 7, 5, 102, 28, 4, 98, 60, 25, 138, 64, 45, 9, 57, 25, 33, 28, 8, 6, 32, 27, 22]
    nt = [38.0, 114, 69, 1533, 355, 59, 945, 632, 278, 1916, 873, 263, 291, 858, 154, 207, 251, 151]
    rc = [3.0, 14, 11, 127, 27, 6, 152, 48, 37, 188, 52, 47, 16, 45, 31, 38, 12, 6, 3, 40, 43, 39]
    nc = [39.0, 116, 93, 1520, 365, 52, 939, 471, 282, 1921, 583, 266, 293, 883, 147, 213, 122, 154]
    nt, nc = [*nt, 174, 209, 391, 680], [*nc, 134, 218, 364, 674]
    client, treated = np.repeat(np.arange(22), 2), np.tile([0.0, 1.0], 22)
    r, n = np.stack([rc, rt], -1).ravel(), np.stack([nc, nt], -1).ravel()
    return {"client": client, "treated": treated, "r": r, "n": n}


def model(batch: Any) -> None:
    """Log odds of each trial's control arm, and its own effect."""
    d = pyro.sample("d", dist.Normal(0.0, 1000.0))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 300.0))
        delta = pyro.sample("delta", dist.Normal(d, tau**-0.5))
        with batch.data():
            eta = mu + delta * batch.treated
            pyro.sample("r", dist.Binomial(batch.n, logits=eta), obs=batch.r)
