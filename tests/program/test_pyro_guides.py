"""Pyro's automatic guides stand for families of hierfl."""

from typing import Any

import pytest
import torch
from pyro.infer import autoguide

from hierfl import guides, methods
from tests.programs import fit, means, read, three


@pytest.mark.parametrize(
    ("of_pyro", "ours"),
    [
        (autoguide.AutoDelta, guides.delta),
        (autoguide.AutoNormal, guides.mean_field),
        (autoguide.AutoNormal(means, init_scale=0.05), guides.mean_field(init_scale=0.05)),
        (autoguide.AutoDiagonalNormal(means), guides.mean_field),
        (autoguide.AutoMultivariateNormal, guides.structured),
        (
            autoguide.AutoLowRankMultivariateNormal(means, init_scale=0.2, rank=2),
            guides.low_rank(rank=2, init_scale=0.2),
        ),
    ],
)
def test_automatic_guides_are_families(of_pyro: Any, ours: Any) -> None:
    fits = [fit(methods.fedsvi(means, guide), three(), rounds=2) for guide in (of_pyro, ours)]
    here, there = (fitted.draws(20, seed=0) for fitted in fits)
    assert torch.equal(here.shared["g"], there.shared["g"])
    assert torch.equal(here.own["b"], there.own["b"])


def test_a_guide_that_is_read_directly_is_mapped_too() -> None:
    of_pyro, ours = (
        read(means, g, three()) for g in (autoguide.AutoNormal(means), guides.mean_field)
    )
    assert [p.name for p in of_pyro.params] == [p.name for p in ours.params]
