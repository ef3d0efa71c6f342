"""The prior of thresholds: order statistics of independent draws."""

from __future__ import annotations

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import nquad
from scipy.stats import t
from torch.distributions import biject_to

from hierfl.models.families import Ordered


def test_log_density_by_hand_and_its_integral() -> None:
    fn = Ordered(dist.StudentT(3.0, 0.5, 2.0), 3)
    value = torch.tensor([-1.0, 0.7, 2.2])
    wanted = t.logpdf(value.numpy(), 3.0, 0.5, 2.0).sum() + np.log(6.0)
    assert fn.log_prob(value).item() == pytest.approx(wanted)
    normal = Ordered(dist.Normal(0.3, 1.0), 2)
    mass = nquad(
        lambda a, b: float(normal.log_prob(torch.tensor([a, b])).exp()) if a < b else 0.0,
        [lambda b: (-6.0, b), (-6.0, 6.0)],
        opts={"epsabs": 1e-4, "epsrel": 1e-4, "limit": 30},
    )[0]
    assert mass == pytest.approx(1.0, abs=1e-3)


def test_draws_are_ordered_and_have_the_means_of_order_statistics() -> None:
    fn = Ordered(dist.Normal(0.0, 1.0), 3)
    drawn = fn.sample((20_000,))
    assert bool((drawn.diff(dim=-1) > 0.0).all())
    # the mean of the largest of 3 standard normals is 3 / (2 sqrt(pi))
    edge = 1.5 / np.sqrt(np.pi)
    np.testing.assert_allclose(drawn.mean(0).numpy(), [-edge, 0.0, edge], atol=0.02)


def test_shapes_expand_and_support() -> None:
    fn = Ordered(dist.Normal(torch.zeros(4, 1), 1.0), 3).expand((4, 5))
    assert (fn.batch_shape, fn.event_shape) == ((4, 5), (3,))
    drawn = fn.rsample((2,))
    assert drawn.shape == (2, 4, 5, 3) and fn.log_prob(drawn).shape == (2, 4, 5)
    free = torch.randn(4, 5, 3)
    assert bool(fn.support.check(biject_to(fn.support)(free)).all())
    with pytest.raises(ValueError, match="within the support"):
        fn.log_prob(torch.tensor([1.0, 0.0, 2.0]))


def test_what_has_no_order_is_refused() -> None:
    with pytest.raises(ValueError, match="must be the distribution of one real number"):
        Ordered(dist.HalfNormal(1.0), 2)
    with pytest.raises(ValueError, match="size is 0: it must be in"):
        Ordered(dist.Normal(0.0, 1.0), 0)
