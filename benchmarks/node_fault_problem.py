"""What `benchmarks.node_faults` fits.

A small logistic hierarchy, by a method whose posterior is a sum over nodes.
"""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import torch

import hierfl
from hierfl.method import Method

SEED = 3


def model(batch: Any) -> None:
    """Slopes that vary between clients, and 0/1 labels."""
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with batch.clients():
        slope = pyro.sample("slope", dist.Normal(loc, 0.7).to_event(1))
        with batch.data():
            pyro.sample("ill", dist.Bernoulli(logits=(batch.x * slope).sum(-1)), obs=batch.ill)


def method() -> Method:
    """Return PVI with few points, for speed.

    The factor that a node keeps is a part of the server's posterior.
    """
    return hierfl.methods.pvi(model, draws=2, steps=1)


def clients() -> hierfl.ClientData:
    """Return five clients of 12 to 40 rows."""
    g = torch.Generator().manual_seed(0)
    counts = torch.tensor([12, 20, 40, 16, 24])
    client = torch.repeat_interleave(torch.arange(len(counts)), counts)
    x = torch.randn(len(client), 2, generator=g)
    slope = torch.tensor([1.0, -0.5]) + 0.7 * torch.randn(len(counts), 2, generator=g)
    chance = ((x * slope[client]).sum(-1)).sigmoid()
    ill = (torch.rand(len(client), generator=g) < chance).to(x.dtype)
    return hierfl.ClientData.from_arrays(client, names=list("abcde"), x=x, ill=ill)
