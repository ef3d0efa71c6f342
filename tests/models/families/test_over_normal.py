"""A response averaged over a Normal linear predictor, against scipy's adaptive integration."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import scipy.integrate
import torch
from torch import Tensor

from hierfl.models import families

Of = Callable[[Tensor], Any]
FAMILIES: dict[str, tuple[Of, tuple[float, ...]]] = {
    "bernoulli": (lambda eta: dist.Bernoulli(logits=eta), (0.0, 1.0)),
    "probit": (lambda eta: dist.Bernoulli(logits=families.probit_logits(eta)), (0.0, 1.0)),
    "cumulative": (
        lambda eta: families.Cumulative(eta, torch.tensor([-1.0, 0.5], dtype=eta.dtype)),
        (0.0, 1.0, 2.0),
    ),
    "poisson": (lambda eta: dist.Poisson(eta.exp()), (0.0, 3.0, 1200.0)),
    "binomial": (lambda eta: families.Binomial(400, logits=eta), (0.0, 130.0, 400.0)),
    "gamma": (lambda eta: dist.Gamma(2.0, 2.0 * (-eta).exp()), (0.1, 40.0)),
    "censored": (
        lambda eta: families.Censored(families.Weibull(eta.exp(), 1.5), cens=torch.ones(())),
        (2.0,),
    ),
}
CASES = [(name, y) for name, (_, values) in FAMILIES.items() for y in values]
AT = ((0.3, 0.0), (0.3, 0.5), (-1.0, 2.0))  # mean and sd of the predictor


def by_quadrature(of: Of, y: float, loc: float, sd: float) -> float:
    """Return the log density by scipy, in pieces about the largest value of the integrand."""
    value = torch.tensor(y, dtype=torch.float64)

    def log_integrand(eta: Any) -> Any:
        at = torch.as_tensor(eta, dtype=torch.float64)
        return (of(at).log_prob(value) + dist.Normal(loc, sd).log_prob(at)).numpy()

    if sd == 0.0:
        return float(of(torch.tensor(loc, dtype=torch.float64)).log_prob(value))
    grid = np.linspace(loc - 30 * sd, loc + 30 * sd, 20_001)
    each = log_integrand(grid)
    top = each.max()
    found = scipy.integrate.simpson(np.exp(each - top), x=grid)
    return float(top + np.log(found))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("name", "y"), CASES)
def test_log_density(name: str, y: float, dtype: torch.dtype) -> None:
    of, _ = FAMILIES[name]
    for loc, sd in AT:
        fn = families.over_normal(
            of, torch.full((2,), loc, dtype=dtype), torch.tensor(sd**2, dtype=dtype)
        )
        found = fn.log_prob(torch.full((2,), y, dtype=dtype))
        assert found.shape == (2,)
        expected = by_quadrature(of, y, loc, sd)
        assert found[0].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_moments_and_draws(name: str) -> None:
    of, _ = FAMILIES[name]
    if name == "censored":
        return  # its times are not drawn
    loc, variance = (
        torch.tensor([0.3], dtype=torch.float64),
        torch.tensor([0.25], dtype=torch.float64),
    )
    fn = families.over_normal(of, loc, variance)
    torch.manual_seed(0)
    drawn = of(0.3 + 0.5 * torch.randn(400_000, dtype=torch.float64)).sample()
    if name == "cumulative":
        share = torch.stack([(drawn == level).double().mean() for level in range(3)])
        torch.testing.assert_close(fn.probs[0], share, atol=4e-3, rtol=0.0)
        return
    assert fn.mean.item() == pytest.approx(drawn.mean().item(), rel=0.01)
    assert fn.variance.item() == pytest.approx(drawn.var().item(), rel=0.02)
    again = fn.expand([3, 1]).sample((100_000,))
    assert again.shape == (100_000, 3, 1)
    assert again.mean().item() == pytest.approx(fn.mean.item(), rel=0.02)


@pytest.mark.parametrize(("name", "y"), CASES)
@pytest.mark.parametrize("variance", [0.0, 0.3])
def test_derivatives(name: str, y: float, variance: float) -> None:
    """First and second derivatives at a point, also where no value is missing, against differences."""
    y = min(y, 130.0)  # beyond, differences have no digits
    of, value = FAMILIES[name][0], torch.tensor(y, dtype=torch.float64)
    base = torch.tensor([0.2, variance], dtype=torch.float64)

    def log_prob(at: Tensor) -> Tensor:
        # the second number is step^2, as in a formula: its coefficient may be 0
        return families.over_normal(of, at[0], at[1] ** 2).log_prob(value)

    at = torch.stack([base[0], base[1].sqrt()])
    slope = torch.func.grad(log_prob)(at)
    hessian: Any = torch.autograd.functional.hessian
    curved = hessian(log_prob, at)
    h = 1e-2
    for j in range(2):
        step = torch.zeros(2, dtype=torch.float64).index_fill(0, torch.tensor(j), h)
        near = [(at + k * step).tolist() for k in (-2, -1, 0, 1, 2)]
        ends = [by_quadrature(of, y, loc, abs(sd)) for loc, sd in near]
        first = (ends[0] - 8 * ends[1] + 8 * ends[3] - ends[4]) / (12 * h)
        second = (-ends[0] + 16 * ends[1] - 30 * ends[2] + 16 * ends[3] - ends[4]) / (12 * h**2)
        assert slope[j].item() == pytest.approx(first, rel=2e-3, abs=2e-3)
        assert curved[j, j].item() == pytest.approx(second, rel=5e-3, abs=5e-3)
