"""First and second derivatives of every likelihood, which the Laplace steps of two_stage need."""

import numpy as np
import pytest
import scipy.stats as st
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from hierfl.models import families
from hierfl.models.families.counts import log_rising
from tests.models.families.cases import CASES, Case
from tests.models.families.test_censored import ENTRY, ROWS, UPPER

CENSORED = {
    f"{name}_censored": Case(
        CASES[name].family,
        CASES[name].values,
        CASES[name].by_hand,
        CASES[name].parameters,
        {"cens": ROWS, "upper": UPPER, "entry": ENTRY},
    )
    for name in ("exponential", "weibull", "lognormal", "piecewise_exponential")
}


@pytest.mark.parametrize("name", [*CASES, *CENSORED])
def test_derivatives_up_to_the_second(name: str) -> None:
    case = {**CASES, **CENSORED}[name]
    known = case.names()
    unknown = {k: v.requires_grad_() for k, v in known.items() if k in case.parameters}
    rows = {k: v for k, v in known.items() if k in case.additions}
    value = torch.tensor(case.values)

    def total(eta: Tensor, *own: Tensor) -> Tensor:
        names = dict(zip(unknown, own, strict=True))
        fn = case.family.of(eta, **names, **rows)
        found: Tensor = fn.log_prob(value)
        return found

    inputs = (torch.tensor(case.eta, requires_grad=True), *unknown.values())
    assert gradcheck(total, inputs)
    assert gradgradcheck(total, inputs)


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_far_ordinal_probabilities_are_finite(link: str) -> None:
    """In single precision, where dist.OrderedLogistic stops near -16 nats."""
    eta = torch.tensor([-60.0, -12.0, 0.0, 12.0, 60.0], dtype=torch.float32, requires_grad=True)
    thresholds = torch.tensor([-1.0, 0.2, 1.5], dtype=torch.float32, requires_grad=True)
    logits = families.Cumulative(eta, thresholds, link).logits
    with np.errstate(divide="ignore"):
        double = families.Cumulative(eta.double(), thresholds.double(), link).logits
    torch.testing.assert_close(logits.double(), double, rtol=1e-5, atol=1e-6)
    assert logits.min() < -50.0
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(5, dtype=torch.float32))
    levels = torch.arange(4)[:, None]
    log_p = families.Cumulative(eta, thresholds, link).log_prob(levels)
    torch.testing.assert_close(log_p, logits.mT, rtol=1e-5, atol=1e-6)
    (slope,) = torch.autograd.grad(log_p.sum(), eta, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), eta)
    assert bool(slope.isfinite().all()) and bool(bend.isfinite().all())


SHAPES = torch.tensor([29.999, 30.001, 1e3, 1e5, 1e8], dtype=torch.float64)


def test_overdispersed_counts_near_their_limits_in_single_precision() -> None:
    """Against double precision of scipy; torch.lgamma is off by 0.1 and more there."""
    count, mean = torch.tensor(4.0), 3.0
    wanted = st.nbinom.logpmf(4, SHAPES.numpy(), (SHAPES / (SHAPES + mean)).numpy())
    torch.set_default_dtype(torch.float32)
    shape = SHAPES.float().requires_grad_()
    fn = families.negative_binomial().of(torch.tensor(mean).log(), shape=shape)
    found = fn.log_prob(count.float())
    np.testing.assert_allclose(found.detach().numpy(), wanted, atol=2e-5)
    both = families.beta_binomial().of(
        torch.tensor(0.3), phi=SHAPES.float(), trials=torch.tensor(9)
    )
    p = 1.0 / (1.0 + np.exp(-0.3))
    phi = SHAPES.numpy()
    wanted = st.betabinom.logpmf(4, 9, p * phi[:3], (1.0 - p) * phi[:3])
    found_too = both.log_prob(count.float()).numpy()
    np.testing.assert_allclose(found_too[:3], wanted, atol=2e-5)
    assert found_too[-1] == pytest.approx(st.binom.logpmf(4, 9, p), abs=2e-5)
    (slope,) = torch.autograd.grad(found.sum(), shape, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), shape)
    assert bool(slope.isfinite().all()) and bool(bend.isfinite().all())


def test_log_rising_has_the_derivatives_of_log_gamma() -> None:
    start = torch.tensor([0.3, 5.0, 29.9, 30.1, 200.0], requires_grad=True)
    steps = torch.tensor([0.0, 3.0, 2.0, 7.0, 500.0])
    found = log_rising(start, steps)
    torch.testing.assert_close(found, torch.lgamma(start + steps) - torch.lgamma(start))
    (slope,) = torch.autograd.grad(found.sum(), start, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), start)
    digamma, trigamma = torch.digamma, torch.special.polygamma
    torch.testing.assert_close(slope, digamma(start + steps) - digamma(start))
    torch.testing.assert_close(bend, trigamma(1, start + steps) - trigamma(1, start))


def test_a_weibull_that_underflows() -> None:
    """(0.1 / 2)^60 is 0 in single precision."""
    torch.set_default_dtype(torch.float32)
    shape = torch.tensor(60.0, requires_grad=True)
    fn = families.Weibull(torch.tensor(2.0), shape)
    found = fn.log_prob(torch.tensor(0.1))
    assert found.item() == pytest.approx(st.weibull_min.logpdf(0.1, 60.0, scale=2.0), rel=1e-5)
    (slope,) = torch.autograd.grad(found, shape)
    assert slope.item() == pytest.approx(1.0 / 60.0 + np.log(0.1 / 2.0), rel=1e-5)


@pytest.mark.parametrize("link", ["probit", "cloglog"])
def test_far_binary_probabilities_are_finite(link: str) -> None:
    eta = torch.tensor([-60.0, -8.001, -7.999, 3.0, 4.0], dtype=torch.float32, requires_grad=True)
    fn = families.bernoulli(link).of(eta)
    both = torch.stack([fn.log_prob(torch.zeros(5)), fn.log_prob(torch.ones(5))])
    exact = eta.detach().double()
    if link == "probit":
        wanted = torch.stack([torch.special.log_ndtr(-exact), torch.special.log_ndtr(exact)])
    else:
        wanted = torch.stack([-exact.exp(), (-torch.expm1(-exact.exp())).log()])
    torch.testing.assert_close(both.double(), wanted, rtol=1e-5, atol=1e-6)
    (slope,) = torch.autograd.grad(both.sum(), eta, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), eta)
    assert bool(slope.isfinite().all()) and bool(bend.isfinite().all())
