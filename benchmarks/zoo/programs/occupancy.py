"""Whether frogs live in ponds of six regions, by four visits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist

SOURCE = "NumPyro's forum and Stan's case study, occupancy"
IDIOM = "an enumerated site, several observed"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(60)
    client, x = np.repeat(np.arange(6), 20), rng.standard_normal(120)
    psi = 1 / (1 + np.exp(-(0.3 + 0.8 * x + rng.normal(0, 0.6, 6)[client])))
    z = rng.random(120) < psi
    y = (rng.random((120, 4)) < 0.45) & z[:, None]
    return {"client": client, "x": x, "y": y.astype(float)}


def model(batch: Any) -> None:
    """A pond without frogs shows none."""
    a = pyro.sample("a", dist.Normal(0.0, 1.5))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with batch.clients():
        region = pyro.sample("region", dist.Normal(0.0, tau))
        with batch.data():
            z = pyro.sample("z", dist.Bernoulli(logits=a + region + b * batch.x))
            for t in range(4):
                pyro.sample(f"y_{t}", dist.Bernoulli(z * p), obs=batch.y[..., t])
