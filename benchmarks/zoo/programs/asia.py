"""A chest clinic's network: smoking, tuberculosis, cancer, bronchitis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume II, Asia; Lauritzen and Spiegelhalter"
IDIOM = "discrete labels of rows that cause each other, tables"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(123)
    n = 400
    client = np.repeat(np.arange(8), 50)
    smoke = rng.random(n) < (1 / (1 + np.exp(-0.4 * rng.standard_normal(8))))[client]
    tb = rng.random(n) < 0.15
    cancer = rng.random(n) < np.where(smoke, 0.3, 0.05)
    bronchitis = rng.random(n) < np.where(smoke, 0.6, 0.3)
    either = tb | cancer
    xray = rng.random(n) < np.where(either, 0.95, 0.05)
    short = rng.random(n) < np.where(
        either, np.where(bronchitis, 0.9, 0.7), np.where(bronchitis, 0.8, 0.1)
    )
    names = {"smoke": smoke, "xray": xray, "short": short}
    return {"client": client, **{k: v.astype(float) for k, v in names.items()}}


def model(batch: Any) -> None:
    """Illnesses are not seen, an x-ray and breath are."""
    p_tb = pyro.sample("p_tb", dist.Beta(2.0, 10.0))
    p_cancer = pyro.sample("p_cancer", dist.Beta(torch.tensor([1.0, 3.0]), 8.0).to_event(1))
    p_bronchitis = pyro.sample("p_bronchitis", dist.Beta(torch.tensor([3.0, 6.0]), 5.0).to_event(1))
    p_short = pyro.sample(
        "p_short",
        dist.Beta(torch.tensor([2.0, 8.0, 7.0, 9.0]), torch.tensor([8.0, 2.0, 3.0, 1.0])).to_event(
            1
        ),
    )
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(mean, tau))
        with batch.data():
            pyro.sample("smoke", dist.Bernoulli(logits=own), obs=batch.smoke)
            smoke = (
                batch.smoke.astype(int) if hasattr(batch.smoke, "astype") else batch.smoke.long()
            )
            tb = pyro.sample("tb", dist.Bernoulli(p_tb), infer={"enumerate": "parallel"})
            cancer = pyro.sample(
                "cancer", dist.Bernoulli(p_cancer[smoke]), infer={"enumerate": "parallel"}
            )
            sick = pyro.sample(
                "sick", dist.Bernoulli(p_bronchitis[smoke]), infer={"enumerate": "parallel"}
            )
            either = 1.0 - (1.0 - tb) * (1.0 - cancer)
            pyro.sample("xray", dist.Bernoulli(0.05 + 0.9 * either), obs=batch.xray)
            p = (1 - either) * ((1 - sick) * p_short[0] + sick * p_short[1]) + either * (
                (1 - sick) * p_short[2] + sick * p_short[3]
            )
            pyro.sample("short", dist.Bernoulli(p), obs=batch.short)
