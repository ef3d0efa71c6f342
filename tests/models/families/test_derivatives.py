"""First and second derivatives of every likelihood, which the Laplace steps of two_stage need."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from hierfl.models import families
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
    logits = families.cumulative_logits(eta, thresholds, link)
    with np.errstate(divide="ignore"):
        double = families.cumulative_logits(eta.double(), thresholds.double(), link)
    torch.testing.assert_close(logits.double(), double, rtol=1e-5, atol=1e-6)
    assert logits.min() < -50.0
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(5, dtype=torch.float32))
    (slope,) = torch.autograd.grad(logits.sum(), eta, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), eta)
    assert bool(slope.isfinite().all()) and bool(bend.isfinite().all())


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
