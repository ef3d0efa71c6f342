"""Kidney infections: Weibull times with a frailty of each patient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume I, Kidney"
IDIOM = "censoring by a factor, Gamma frailty"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(19)
    client, sex = np.repeat(np.arange(38), 2), np.repeat(rng.integers(0, 2, 38), 2).astype(float)
    frailty = np.repeat(rng.gamma(2.0, 0.5, 38), 2)
    t = (rng.exponential(size=76) / (0.02 * frailty * np.exp(-0.8 * sex))) ** (1 / 1.1)
    end = rng.exponential(150.0, 76)
    time, event = np.minimum(t, end) / 100, (t <= end).astype(float)
    return {"client": client, "sex": sex, "time": time, "event": event}


def model(batch: Any) -> None:
    """Log hazards of observed times, minus cumulative hazards of all."""
    r = pyro.sample("r", dist.Gamma(1.0, 1.0))
    b0 = pyro.sample("b0", dist.Normal(0.0, 10.0))
    b = pyro.sample("b", dist.Normal(0.0, 10.0))
    theta = pyro.sample("theta", dist.Gamma(1.0, 1.0))
    with batch.clients():
        w = pyro.sample("w", dist.Gamma(theta, theta))
        with batch.data():
            log_rate = torch.log(w) + b0 + b * batch.sex
            log_hazard = torch.log(r) + (r - 1.0) * torch.log(batch.time) + log_rate
            total = torch.exp(log_rate) * batch.time**r
            pyro.factor("times", batch.event * log_hazard - total)
