"""Stack loss: robust regression, without local sites."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume I, Stacks"
IDIOM = "no local site, Student's t"


def rows() -> dict[str, Any]:
    """Return the rows."""
    x = [[80, 27, 89], [80, 27, 88], [75, 25, 90], [62, 24, 87], [62, 22, 87], [62, 23, 87]]
    x += [[62, 24, 93], [62, 24, 93], [58, 23, 87], [58, 18, 80], [58, 18, 89], [58, 17, 88]]
    x += [[58, 18, 82], [58, 19, 93], [50, 18, 89], [50, 18, 86], [50, 19, 72], [50, 19, 79]]
    z = np.array([*x, [50, 20, 80], [56, 20, 82], [70, 20, 91]], float)
    y = [42.0, 37, 37, 28, 18, 18, 19, 20, 15, 14, 14, 13, 11, 12, 8, 7, 8, 8, 9, 15, 15]
    z = (z - z.mean(0)) / z.std(0)
    return {"client": np.arange(21) % 3, "z": z, "y": np.array(y)}


def model(batch: Any) -> None:
    """Linear regression with Student's t noise of four degrees of freedom."""
    b0 = pyro.sample("b0", dist.Normal(0.0, 300.0))
    b = pyro.sample("b", dist.Normal(torch.zeros(3), 300.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(10.0))
    with batch.clients(), batch.data():
        loc = b0 + (batch.z * b).sum(-1)
        pyro.sample("y", dist.StudentT(4.0, loc, sigma), obs=batch.y)
