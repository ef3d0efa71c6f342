"""The spline flow is a bijection with the right Jacobian, so that it maps a Normal to a density."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from hierfl.core import noise
from hierfl.guides.global_sites import SplineFlow, spline

GRID = 400


def far_from_start(flow: SplineFlow, size: float) -> dict[str, Tensor]:
    """Weights far from the start, so that the flow is far from the identity."""
    key = noise.root_key(3)
    return {
        name: value.detach()
        + size * noise.normals(noise.fold(key, noise.word(name)), tuple(value.shape))
        for name, value in flow.named_parameters()
    }


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_spline_increases_and_returns_its_log_slope(spread: float) -> None:
    x = torch.linspace(-7.0, 7.0, 1400)  # without the bounds, where torch 2.14 has another slope
    raw = [
        spread * noise.normals(noise.fold(noise.root_key(1), k), (n,)).expand(len(x), n)
        for k, n in enumerate((8, 8, 7))
    ]
    y, log_slope = spline(x, *raw, bound=6.0)
    slope = torch.vmap(torch.func.grad(lambda v, *r: spline(v, *r, bound=6.0)[0]))(x, *raw)
    assert bool((y.diff() > 0).all())
    torch.testing.assert_close(slope.log(), log_slope)
    outside = x.abs() > 6.0
    torch.testing.assert_close(y[outside], x[outside])
    if not spread:
        torch.testing.assert_close(y, x)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_log_determinant_agrees_with_autograd(size: int) -> None:
    flow = SplineFlow(size, hidden=3, bins=6)  # for size 5 the flow widens its networks to 5
    weights = far_from_start(flow, 0.5)
    e = 2.0 * noise.normals(noise.root_key(5), (50, size))

    def value(one: Tensor) -> Tensor:
        out: Tensor = functional_call(flow, weights, (one,))[0]
        return out

    _, log_det = torch.vmap(lambda one: functional_call(flow, weights, (one,)))(e)
    jacobian = torch.vmap(torch.func.jacrev(value))(e)
    torch.testing.assert_close(torch.linalg.slogdet(jacobian)[1], log_det)
    assert bool((torch.linalg.det(jacobian) > 0).all())


def test_transformed_normal_integrates_to_1() -> None:
    """Let q be the density of z = f(e), e standard normal, and r any density.

    Then E_q[r(z) / q(z)] is the integral of r, which is 1.
    """
    flow = SplineFlow(2, hidden=16, bins=8)
    weights = far_from_start(flow, 0.2)
    unit = (torch.arange(GRID) + 0.5) / GRID
    e = dist.Normal(0.0, 1.0).icdf(torch.cartesian_prod(unit, unit))
    z, log_det = functional_call(flow, weights, (e,))
    log_q = -0.5 * e.square().sum(-1) - math.log(2.0 * math.pi) - log_det
    for scale in (0.2, 0.5):
        log_r = dist.Normal(z.mean(0), scale * z.std(0)).log_prob(z).sum(-1)
        assert (log_r - log_q).exp().mean().item() == pytest.approx(1.0, abs=5e-3)
