"""Relapse in ten hospitals, where part of the patients is cured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Stan's forum and survival papers, a mixture cure model"
IDIOM = "logaddexp of a cured part, two local sites"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(109)
    client, x = np.repeat(np.arange(10), 40), rng.integers(0, 2, 400).astype(float)
    u = 0.4 * rng.standard_normal((10, 2))
    ill = rng.random(400) < 1 / (1 + np.exp(-(0.4 - 0.8 * x + u[client, 0])))
    t = (rng.exponential(size=400) / np.exp(-0.2 + u[client, 1])) ** (1 / 1.3)
    end = rng.uniform(1.0, 5.0, 400)
    event = ill & (t < end)
    return {"client": client, "x": x, "t": np.where(event, t, end), "event": event.astype(float)}


def model(batch: Any) -> None:
    """A logit of not being cured, and Weibull times of the others."""
    a = pyro.sample("a", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    tau = pyro.sample("tau", dist.HalfNormal(0.5 * torch.ones(2)).to_event(1))
    with batch.clients():
        u = pyro.sample("u", dist.Normal(a, tau).to_event(1))
        with batch.data():
            eta, rate = u[..., 0] + b * batch.x, torch.exp(u[..., 1])
            log_ill = -torch.log1p(torch.exp(-eta))
            log_cured = -torch.log1p(torch.exp(eta))
            hazard = torch.log(shape * rate) + (shape - 1.0) * torch.log(batch.t)
            survival = -rate * batch.t**shape
            seen = log_ill + hazard + survival
            unseen = torch.logaddexp(log_cured, log_ill + survival)
            pyro.factor("t", torch.where(batch.event > 0, seen, unseen))
