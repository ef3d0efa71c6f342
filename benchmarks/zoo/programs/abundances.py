"""Birds of 96 plots in 8 woods, counted on three visits that miss some: an N-mixture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import config_enumerate

SOURCE = "Royle 2004, Biometrics 60; Kery and Schaub, BPA, chapter 12"
IDIOM = "an enumerated count a row, Binomials of it"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(4)
    client = np.repeat(np.arange(8), 12)
    count = rng.poisson(np.exp(1.3 + 0.4 * rng.standard_normal(8))[client])
    return {"client": client, "y": rng.binomial(count[:, None], 0.45, (96, 3)).astype(float)}


@config_enumerate
def model(batch: Any) -> None:
    """Up to 24 birds a plot, Poisson but for that."""
    m = pyro.sample("m", dist.Normal(1.0, 1.0))
    s = pyro.sample("s", dist.HalfNormal(1.0))
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    counts = torch.arange(25.0)
    with batch.clients():
        a = pyro.sample("a", dist.Normal(m, s))
        with batch.data():
            logits = counts * a[..., None] - torch.lgamma(counts + 1.0)
            n = pyro.sample("n", dist.Categorical(logits=logits))
            seen = dist.Binomial(n[..., None] * 1.0, p, validate_args=False)
            pyro.sample("y", seen.to_event(1), obs=batch.y)
