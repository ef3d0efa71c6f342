"""Signed scales with long tails, sampled by their inverse hyperbolic sine."""

from __future__ import annotations

import math

import torch
from scipy.stats import t as student_t
from torch import Tensor
from torch.distributions import StudentT

from hierfl.summaries.chains import Stretch, Whitening, sampled, stretch

FREEDOM = 2.5  # degrees of freedom of the signed scale: a tail as that of a scale of few clients
EVEN = torch.tensor([True, False])


def long_tailed(x: Tensor) -> tuple[Tensor, Tensor]:
    """A Student t number and a standard normal one that leans on it: log density and gradient at (C, 2)."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        scale, other = x.unbind(1)
        value = StudentT(FREEDOM).log_prob(scale) - 0.5 * (other - scale.square().log1p()).square()
        (slope,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), slope


def test_there_and_back_again() -> None:
    change = Stretch(EVEN, torch.tensor([0.3, 1.0]))
    x = torch.tensor([[-20.0, 4.0], [0.0, -4.0], [0.2, 0.0]])
    torch.testing.assert_close(change.from_u(change.to_u(x)), x)
    assert torch.equal(change.to_u(x)[:, 1], x[:, 1])


def test_the_density_of_u_has_the_jacobian_and_the_gradient_is_its_own() -> None:
    change = Stretch(EVEN, torch.tensor([0.3, 1.0]))
    u = torch.tensor([[-3.0, 0.4], [0.0, -0.2], [1.5, 2.0]])
    value, slope = change.density(long_tailed)(u)
    growth = [torch.autograd.functional.jacobian(change.from_u, row).det().log() for row in u]
    expected = long_tailed(change.from_u(u))[0] + torch.stack(growth)
    torch.testing.assert_close(value - value[0], expected - expected[0])
    step = 1e-6
    for k in range(2):
        away = step * torch.eye(2)[k]
        up, down = (change.density(long_tailed)(u + sign * away)[0] for sign in (1, -1))
        torch.testing.assert_close((up - down) / (2 * step), slope[:, k], atol=1e-6, rtol=1e-6)


def test_a_whitening_goes_there_and_back_again() -> None:
    change = Stretch(EVEN, torch.tensor([0.3, 1.0]))
    whitening = Whitening(torch.tensor([0.5, 1.0]), torch.tensor([[0.2, 0.0], [0.1, 0.7]]))
    back = change.whitening_in_x(change.whitening_in_u(whitening))
    torch.testing.assert_close(back.loc, whitening.loc)
    torch.testing.assert_close(back.tril, whitening.tril)


def test_the_tail_of_a_scale_is_reached() -> None:
    """Chains of x itself stay in the tail for long, or never come there: their 99 % quantile is off by more."""
    start = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    whitening = Whitening(torch.zeros(2), torch.eye(2))
    exact = math.log(student_t(FREEDOM).ppf(0.995))

    def error(change: Stretch) -> float:
        """Return the root mean square error of the log of the 99 % quantile of |x|, over 4 runs."""
        errors = []
        for seed in range(4):
            found = sampled(
                change.density(long_tailed),
                change.to_u(start),
                change.whitening_in_u(whitening),
                draws=6400,
                warmup=60,
                least=100,
                seed=seed,
                even=EVEN,
                dense=2,
            )
            sizes = change.from_u(found.draws)[:, 0].abs()
            errors.append(sizes.quantile(0.99).log() - exact)
        return float(torch.stack(errors).square().mean().sqrt())

    none = Stretch(torch.tensor([False, False]), torch.ones(2))
    assert error(stretch(start, EVEN)) < 0.15 < error(none)
