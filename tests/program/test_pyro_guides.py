"""Pyro's automatic guides stand for families of hierfl."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import autoguide

import hierfl
from hierfl import ClientBatch, ClientData, guides, methods


def model(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with batch.clients():
        own = pyro.sample("a", dist.Normal(mu, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(own, 1.0), obs=batch.y)


def data() -> ClientData:
    """Return three clients of four rows."""
    return ClientData.from_arrays(torch.arange(12) // 4, y=torch.arange(12.0) / 6.0)


@pytest.mark.parametrize(
    ("of_pyro", "ours"),
    [
        (autoguide.AutoDelta, guides.delta),
        (autoguide.AutoNormal, guides.mean_field),
        (autoguide.AutoNormal(model, init_scale=0.05), guides.mean_field(init_scale=0.05)),
        (autoguide.AutoDiagonalNormal(model), guides.mean_field),
        (autoguide.AutoMultivariateNormal, guides.structured),
        (
            autoguide.AutoLowRankMultivariateNormal(model, init_scale=0.2, rank=2),
            guides.low_rank(rank=2, init_scale=0.2),
        ),
    ],
)
def test_automatic_guides_are_families(of_pyro: Any, ours: Any) -> None:
    fits = [
        hierfl.fit(methods.fedsvi(model, guide), data(), rounds=2, seed=0, progress=False)
        for guide in (of_pyro, ours)
    ]
    here, there = (fit.draws(20, seed=0) for fit in fits)
    assert torch.equal(here.shared["mu"], there.shared["mu"])
    assert torch.equal(here.own["a"], there.own["a"])


def test_a_guide_that_is_read_directly_is_mapped_too() -> None:
    program = hierfl.read(model, autoguide.AutoNormal(model), data())
    assert [p.name for p in program.params] == [
        p.name for p in hierfl.read(model, guides.mean_field, data()).params
    ]
