"""What each family refuses, with row, value and the family that can have it; and the prior of thresholds."""

from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import nquad
from scipy.stats import t
from torch.distributions import biject_to

from hierfl.models import families
from hierfl.models.families import Ordered
from tests.models.families.cases import CASES

GOOD: list[Any] = [0.5, 1.0]

REFUSED = [
    ("gaussian", [1.0, np.inf], "value inf in row 1: .* a finite number; drop the row"),
    ("gaussian", [1.0, np.nan], "the response in row 1 is missing: drop the row"),
    ("gaussian", ["a", "b"], "needs numbers in the response: .*'a'.* use family='categorical'"),
    ("student", [-np.inf], "value -inf in row 0: .*; drop the row"),
    ("bernoulli", [0, 1, 2], "value 2 in row 2: .*'bernoulli' is 0 or 1; use family='poisson'"),
    ("bernoulli", [0.4, 1], "value 0.4 in row 0: .* 'beta' for shares"),
    ("bernoulli", [1, -1], "value -1 in row 1: .* or 'gaussian'"),
    ("poisson", [3, 1.5], r"value 1.5 in row 1: .* a count 0, 1, 2, \.\.\.; use family='gamma'"),
    ("negative_binomial", [3, -1], "value -1 in row 1: .* or 'gaussian'"),
    ("zero_inflated_poisson", [0, 0.5], "value 0.5 in row 1: .* use family='gamma'"),
    ("gamma", [1.0, 0.0], "value 0 in row 1: .* a number above 0; use family='poisson'"),
    ("gamma", [-1.0], "value -1 in row 0: .* or 'gaussian'"),
    ("lognormal", [0.0], "value 0 in row 0: .* a time above 0; give a time above 0"),
    ("weibull", [2.0, -0.1], "value -0.1 in row 1: .* give a time above 0"),
    ("exponential", [np.nan], "the response in row 0 is missing"),
    (
        "beta",
        [0.5, 1.0],
        "value 1 in row 1: .* strictly between 0 and 1; use family='ordered_beta'",
    ),
    ("beta", [1.7], "value 1.7 in row 0: .* or 'gaussian'"),
    ("hurdle_gamma", [0.0, -0.5], "value -0.5 in row 1: .* 0 or more; use family='gaussian'"),
    ("ordered_beta", [0.0, 50.0], "value 50 in row 1: .* a number from 0 to 1; divide percentages"),
    ("hurdle_poisson", [0, 0.5], "value 0.5 in row 1: .* use family='gamma'"),
    ("categorical", [0.0, 0.5], "value 0.5 in row 1: .* give the levels as text"),
    ("cumulative", [-1], "value -1 in row 0: .* give the levels as text"),
    ("cumulative", ["low", None], "the response in row 1 is missing"),
    ("von_mises", [0.3, 90.0], "value 90 in row 1: .* take numpy.deg2rad of degrees"),
    ("dirichlet", [[0.5, 0.5], [0.4, 0.4]], "the sum of shares 0.8 in row 1: divide"),
    ("dirichlet", [[0.5, 0.5], [0.0, 1.0]], "value 0 in row 1: .* use family='multinomial'"),
    ("dirichlet", [[0.5, 0.5], [0.4, np.nan]], "the response in row 1 is missing"),
]


@pytest.mark.parametrize(("name", "values", "message"), REFUSED)
def test_refused_values(name: str, values: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        families.named(name).check(values)


LATE = [
    ("text", {"cens": [0, "right"]}, "needs numbers in the cens: .*'right'"),
    ("alone", {"upper": [1, 2]}, "'upper' is read where .* add 'cens'"),
    ("cens", {"cens": [0, 3]}, "cens 3 in row 1: it must be 0 .exact., 1 .right., -1 .left. or 2"),
    ("upper", {"cens": [0, 2]}, "cens 2 in row 1: it is an interval .*: add the row field 'upper'"),
    ("below", {"cens": [0, 2], "upper": [0, 0.9]}, "upper 0.9 in row 1: it must be above"),
    ("open", {"cens": [2, 0], "upper": [np.inf, 0]}, "upper inf in row 0: .* has cens 1"),
    ("unknown", {"cens": [2, 0], "upper": [np.nan, 0]}, "upper nan in row 0"),
    ("late", {"entry": [0.0, 1.0]}, "entry 1 in row 1: it must be 0 or more, and below"),
    ("negative", {"entry": [-1.0, 0.0]}, "entry -1 in row 0"),
    ("missing", {"entry": [0.0, np.nan]}, "the entry in row 1 is missing"),
    ("short", {"cens": [0]}, "'cens' has 1 values for 2 responses: give one a row"),
    ("other", {"trials": [1, 1]}, "takes cens and upper and entry, not 'trials': leave it out"),
]


@pytest.mark.parametrize(("case", "fields", "message"), LATE)
def test_refused_additions_of_times(case: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        families.weibull().check(GOOD, fields)


def test_refused_parts() -> None:
    family = families.multinomial()
    for values, trials, message in (
        ([1, 2], [1, 2], r"is one column: .* write cbind\(a, b, c\)"),
        ([[1, 2], [0, 0.5]], [3, 1], "value 0.5 in row 1: .* use family='dirichlet'"),
        ([[1, 2], [0, 1]], [3, 2], "trials 2 in row 1: trials must be the sum"),
    ):
        with pytest.raises(ValueError, match=message):
            family.check(np.array(values), {"trials": trials})


def test_refused_trials() -> None:
    family = families.binomial()
    with pytest.raises(ValueError, match=r"trials 2 in row 1: trials must be whole"):
        family.check([0, 3], {"trials": [1, 2]})
    with pytest.raises(ValueError, match=r"trials 2\.5 in row 0"):
        family.check([0, 3], {"trials": [2.5, 4]})
    with pytest.raises(ValueError, match="needs the row field 'trials': add it"):
        family.check([0, 3])


@pytest.mark.parametrize("name", CASES)
def test_allowed_values(name: str) -> None:
    case = CASES[name]
    values = case.values.reshape(-1, *case.values.shape[2:])
    case.family.check(values, {k: v.ravel() for k, v in case.additions.items()})


def test_allowed_at_the_edges() -> None:
    families.binomial().check([0, 0], {"trials": [0, 3]})
    families.weibull().check(
        [1.0, 2.0, 3.0], {"cens": [1, -1, 2], "upper": [np.nan, 0.0, 3.5], "entry": [0.0, 1.0, 3.0]}
    )
    families.cumulative().check(["low", "high"])
    families.categorical().check(np.array(["a", "b"], dtype=object))


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
