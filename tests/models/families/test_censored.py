"""Censored and late times against scipy and numerical integrals."""

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import scipy.stats as st
import torch
from scipy.integrate import quad

from hierfl.models.families import Censored, PiecewiseExponential
from hierfl.models.families.survival import hazards

TIMES = np.array([[0.2, 1.3, 2.9], [0.7, 1.0, 6.0]])
ROWS = np.array([[0, 1, -1], [2, 0, 2]])
UPPER = np.array([[np.nan, 0.0, 1.0], [1.1, np.inf, 8.0]])  # read where cens is 2 alone
ENTRY = np.array([[0.0, 0.4, 0.3], [0.6, 0.0, 2.0]])

BASES: dict[str, Any] = {
    "exponential": lambda: dist.Exponential(torch.tensor(0.6)),
    "weibull": lambda: dist.Weibull(torch.tensor(1.9), torch.tensor(1.7)),
    "falling_weibull": lambda: dist.Weibull(torch.tensor(1.9), torch.tensor(0.6)),
    "lognormal": lambda: dist.LogNormal(torch.tensor(0.3), torch.tensor(0.8)),
    "piecewise": lambda: PiecewiseExponential(
        torch.tensor(0.2), torch.tensor([-0.6, 0.3, -0.2]), (0.5, 2.0)
    ),
}


# made once: scipy takes a millisecond to freeze a distribution, and integrals ask thousands of times
REFERENCE: dict[str, Any] = {
    "exponential": st.expon(scale=1 / 0.6),
    "weibull": st.weibull_min(1.7, scale=1.9),
    "falling_weibull": st.weibull_min(0.6, scale=1.9),
    "lognormal": st.lognorm(0.8, scale=np.exp(0.3)),
}


@cache
def density(name: str, t: float) -> float:
    """Return the density of the uncensored time."""
    if name == "piecewise":
        rate = np.exp(0.2 + np.array([-0.6, 0.3, -0.2]))
        length = np.clip(t, [0.0, 0.5, 2.0], [0.5, 2.0, np.inf]) - [0.0, 0.5, 2.0]
        piece = int(np.searchsorted([0.5, 2.0], t, side="right"))
        return float(rate[piece] * np.exp(-(rate * length).sum()))
    return float(REFERENCE[name].pdf(t))


def area(name: str, low: float, high: float, power: int = 0) -> float:
    """Return the integral of t^power times the density from low to high, piece by piece."""
    ends = sorted({low, *(b for b in (1e-4, 1e-2, 0.5, 2.0, 20.0) if low < b < high), high})
    return sum(
        quad(lambda t: t**power * density(name, t), a, b, limit=200)[0] for a, b in pairwise(ends)
    )


def by_hand(name: str, time: float, cens: int, upper: float, entry: float) -> float:
    """Return the log density of one row by numerical integrals."""
    known = {
        0: lambda: density(name, time),
        1: lambda: area(name, time, np.inf),
        -1: lambda: area(name, entry, time),
        2: lambda: area(name, time, upper),
    }
    return float(np.log(known[cens]()) - np.log(area(name, entry, np.inf)))


@pytest.mark.parametrize("name", BASES)
def test_log_density_by_integrals(name: str) -> None:
    cens, upper, entry = (torch.tensor(x) for x in (ROWS, UPPER, ENTRY))
    found = Censored(BASES[name](), cens, upper, entry).log_prob(torch.tensor(TIMES))
    rows = zip(TIMES.flat, ROWS.flat, UPPER.flat, ENTRY.flat, strict=True)
    wanted = np.array([by_hand(name, *row) for row in rows]).reshape(2, 3)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6)
    exact = Censored(BASES[name](), entry=torch.tensor(0.3)).log_prob(torch.tensor(1.4))
    assert float(exact) == pytest.approx(by_hand(name, 1.4, 0, 0.0, 0.3), rel=1e-6)


@pytest.mark.parametrize("name", BASES)
def test_without_censoring_it_is_the_distribution_itself(name: str) -> None:
    fn = BASES[name]()
    value = torch.tensor(TIMES)
    torch.testing.assert_close(Censored(fn).log_prob(value), fn.log_prob(value).expand(2, 3))
    torch.testing.assert_close(Censored(fn).mean, fn.mean)
    zero = Censored(fn, entry=torch.zeros(()))
    torch.testing.assert_close(zero.mean, fn.mean)
    torch.testing.assert_close(zero.variance, fn.variance)


@pytest.mark.parametrize("entry", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("name", BASES)
def test_mean_and_variance_beyond_entry(name: str, entry: float) -> None:
    fn = Censored(BASES[name](), entry=torch.tensor(entry))
    total, first, second = (area(name, entry, np.inf, n) for n in range(3))
    assert fn.mean.item() == pytest.approx(first / total, rel=1e-5)
    assert fn.variance.item() == pytest.approx(second / total - (first / total) ** 2, rel=1e-4)


def test_the_mean_of_a_weibull_far_beyond_its_scale() -> None:
    """Where the incomplete gamma function is 0 in double precision: excess times are near exponential."""
    fn = Censored(dist.Weibull(torch.tensor(1.0), torch.tensor(1.0)), entry=torch.tensor(900.0))
    assert fn.mean.item() == pytest.approx(901.0)
    for entry in (102.0, 104.0):  # either side of the change of formulas, at shape 1.5
        fn = Censored(
            dist.Weibull(torch.tensor(1.0), torch.tensor(1.5)), entry=torch.tensor(entry ** (2 / 3))
        )
        low = entry ** (2 / 3)
        survival = quad(lambda t, e=entry: np.exp(e - t**1.5), low, low + 10.0)[0]
        assert fn.mean.item() == pytest.approx(low + survival, rel=1e-8)


@pytest.mark.parametrize("name", BASES)
def test_draws_are_uncensored_times_beyond_entry(name: str) -> None:
    fn = Censored(BASES[name](), torch.tensor(ROWS), torch.tensor(UPPER), torch.tensor(ENTRY))
    drawn = fn.sample((4000,))
    assert bool((drawn >= torch.tensor(ENTRY)).all())
    of = hazards(fn.base)
    # given T > entry, H(T) - H(entry) is exponential
    passed = of.cumulative_hazard(drawn) - of.cumulative_hazard(torch.tensor(ENTRY))
    for row in passed.flatten(1).T:
        assert st.kstest(row.numpy(), st.expon.cdf).pvalue > 1e-3


@pytest.mark.parametrize("name", BASES)
def test_time_at_inverts_the_cumulative_hazard(name: str) -> None:
    of = hazards(BASES[name]())
    time = torch.tensor([1e-3, 0.4, 0.5, 2.0, 7.0])
    torch.testing.assert_close(of.time_at(of.cumulative_hazard(time)), time)
    assert of.cumulative_hazard(torch.zeros(())) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BASES)
def test_far_tails_have_finite_densities_and_gradients(name: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    time = torch.tensor([[1e-6, 50.0, 1e-5], [80.0, 1e-6, 60.0]])
    upper = torch.tensor([[float("nan"), 0.0, 0.0], [81.0, float("inf"), 60.5]])
    entry = torch.tensor([[0.0, 49.0, 0.0], [0.0, 0.0, 59.0]])
    shift = torch.zeros((), requires_grad=True)
    base = BASES[name]()
    if name == "lognormal":
        base = dist.LogNormal(base.loc + shift, base.scale * shift.exp())
    elif name == "exponential":
        base = dist.Exponential(base.rate * shift.exp())
    elif name == "piecewise":
        base = PiecewiseExponential(base.eta + shift, base.log_hazard, base.breaks)
    else:
        base = dist.Weibull(base.scale * shift.exp(), base.concentration * shift.exp())
    fn = Censored(base, torch.tensor(ROWS), upper, entry)
    found = fn.log_prob(time)
    (slope,) = torch.autograd.grad(found.sum(), shift, create_graph=True)
    (bend,) = torch.autograd.grad(slope, shift, allow_unused=True)
    assert bool(found.isfinite().all()) and bool(slope.isfinite())
    assert bend is None or bool(bend.isfinite())


def test_left_censoring_counts_from_entry() -> None:
    """A row seen from 1 on, with its event before 3, is an interval from 1 to 3 among rows beyond 1."""
    fn = dist.Weibull(torch.tensor(1.9), torch.tensor(1.7))
    left = Censored(fn, torch.tensor(-1), entry=torch.tensor(1.0)).log_prob(torch.tensor(3.0))
    between = Censored(fn, torch.tensor(2), torch.tensor(3.0), torch.tensor(1.0))
    torch.testing.assert_close(left, between.log_prob(torch.tensor(1.0)))


def test_what_cannot_be_censored_is_refused() -> None:
    with pytest.raises(TypeError, match="a Gamma has no cumulative hazard: use an Exponential"):
        Censored(dist.Gamma(1.0, 1.0), torch.tensor(1))
    with pytest.raises(ValueError, match="log_hazard has 2 entries for 2 breaks"):
        PiecewiseExponential(torch.zeros(()), torch.zeros(2), (1.0, 2.0))
