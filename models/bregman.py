"""Priors by a Bregman divergence, `p(x | mu) ~ exp(-D_{g*}(x, mu))`: Gaussian, Bernoulli, Poisson, exponential, or any convex g.

An exponential family with log-normaliser g has mean mu = grad g(s) at natural parameter s, and there s = grad g*(mu). Its scaled
density is exp(-lam D_{g*}(x, mu)) times what depends on x alone (Shi et al. 2023, arXiv:2310.09183, Eq. 4 to 6); what is here
is that kernel without those factors, as the authors use it. It is a Gaussian's density for the Gaussian, and for the others a
different density of the same mode mu: Gamma(lam + 1, lam / mu) for the exponential. So it is for point estimates (guide `delta`)
and has no draws. Table 7 of the paper has misprints; the entries here are derived from g, and tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import constraints, transform_to
from torch.distributions.constraints import Constraint
from torch.func import grad, jacrev

__all__ = ["BregmanPrior", "bernoulli", "exponential", "gaussian", "poisson"]

NEWTON_STEPS = 40  # of `natural_of` without a closed form: damped far off, quadratic near by


@dataclass(frozen=True, eq=False)
class BregmanPrior:
    """The family of a strictly convex, twice differentiable log-normaliser g.

    Args:
        g: natural parameters, of one tensor's shape, -> the same shape, one term a number; or -> (), where they interact.
        natural: where natural parameters lie: real, or on one side of a bound.
        mean: where means, and so the values, lie: the image of grad g.
        gradient: grad g, where its closed form is known; None: by autograd.
        inverse: grad g* = (grad g)^-1; None: by Newton's method.
        conjugate: g*, one term a number where g has; None: <x, s> - g(s) at s = grad g*(x).

    >>> cosh = BregmanPrior(lambda s: torch.cosh(s))  # values near 0 cost a square, far ones |x| log |x|
    >>> round(float(cosh.divergence(torch.tensor([2.0]), torch.tensor([0.0]))), 4)
    1.6512
    """

    g: Callable[[Tensor], Tensor]
    natural: Constraint = constraints.real
    mean: Constraint = constraints.real
    gradient: Callable[[Tensor], Tensor] | None = None
    inverse: Callable[[Tensor], Tensor] | None = None
    conjugate: Callable[[Tensor], Tensor] | None = None

    def mean_of(self, natural: Tensor) -> Tensor:
        """Mu = grad g(s)."""
        if self.gradient is not None:
            return self.gradient(natural)

        def total(s: Tensor) -> Tensor:
            return self.g(s).sum()

        mean: Tensor = grad(total)(natural)
        return mean

    def natural_of(self, mean: Tensor) -> Tensor:
        """S = grad g*(mu), of means inside their domain; its derivative is right, whichever way it is found."""
        if self.inverse is not None:
            return self.inverse(mean)
        at = transform_to(self.natural)(torch.zeros_like(mean))
        for _ in range(NEWTON_STEPS):
            at = self._newton(at.detach(), mean.detach(), damped=True)
        return self._newton(at.detach(), mean, damped=False)

    def _newton(self, at: Tensor, mean: Tensor, *, damped: bool) -> Tensor:
        miss = self.mean_of(at) - mean
        if self.separable(at):
            move = miss / self.curvature(at)
        else:
            move = (torch.linalg.inv(self.hessian(at)) @ miss.flatten()).view(at.shape)
        return keep_inside(self.natural, at - (move.clamp(-1.0, 1.0) if damped else move), at)

    def separable(self, like: Tensor) -> bool:
        """Whether g is a sum of terms, one a number."""
        return self.g(like).shape == like.shape

    def curvature(self, natural: Tensor) -> Tensor:
        """The diagonal of the Hessian of g, of a separable g: the derivative of each mean by its own natural parameter."""
        return grad(lambda s: self.mean_of(s).sum())(natural)

    def hessian(self, natural: Tensor) -> Tensor:
        """Of g, (d, d) over the flattened d numbers."""
        shape = natural.shape

        def flat(s: Tensor) -> Tensor:
            return self.g(s.view(shape)).sum()

        found: Tensor = jacrev(grad(flat))(
            natural.flatten()
        )  # reverse over reverse: forward mode is not always right
        return found

    def conjugate_of(self, x: Tensor) -> Tensor:
        """g*(x), (), summed over x."""
        return self._conjugate(x).sum()

    def _conjugate(self, x: Tensor) -> Tensor:
        if self.conjugate is not None:
            return self.conjugate(x)
        s = self.natural_of(x)
        product = x * s
        return product - self.g(s) if self.separable(s) else product.sum() - self.g(s)

    def divergence(self, x: Tensor, mean: Tensor) -> Tensor:
        """D_{g*}(x, mu) = g*(x) - g*(mu) - <grad g*(mu), x - mu> >= 0, (), summed over x."""
        return self.terms(x, mean).sum()

    def terms(self, x: Tensor, mean: Tensor) -> Tensor:
        """The divergence before it is summed: one term a number where g has."""
        slope = self.natural_of(mean) * (x - mean)
        apart = self._conjugate(x) - self._conjugate(mean)
        return apart - (slope if apart.dim() else slope.sum())


def gaussian(precision: float | Tensor = 1.0) -> BregmanPrior:
    """D = precision |x - mu|^2 / 2, the precision a number, or one for each number of x; g(s) = s^2 / (2 precision).

    Correlated numbers: `BregmanPrior(lambda s: 0.5 * s @ cov @ s)`.

    Raises:
        ValueError: a precision that is not > 0.
    """
    p = torch.as_tensor(precision)
    if not bool((p > 0.0).all()):
        raise ValueError(f"precision is {precision}: it must be > 0")
    if p.dim() == 0 and float(p) == 1.0:
        return BregmanPrior(
            lambda s: 0.5 * s.square(),
            conjugate=lambda x: 0.5 * x.square(),
            gradient=_same,
            inverse=_same,
        )
    return BregmanPrior(
        lambda s: 0.5 * s.square() / precision,
        gradient=lambda s: s / precision,
        inverse=lambda x: x * precision,
        conjugate=lambda x: 0.5 * precision * x.square(),
    )


def _same(values: Tensor) -> Tensor:
    return values


def bernoulli() -> BregmanPrior:
    """Values in (0, 1): D = x ln(x / mu) + (1 - x) ln((1 - x) / (1 - mu)); g(s) = ln(1 + e^s)."""
    return BregmanPrior(
        nn.functional.softplus,
        mean=constraints.unit_interval,
        gradient=torch.sigmoid,
        inverse=torch.logit,
        conjugate=lambda x: torch.xlogy(x, x) + torch.xlogy(1.0 - x, 1.0 - x),
    )


def poisson() -> BregmanPrior:
    """Values > 0: D = x ln(x / mu) - x + mu; g(s) = e^s."""
    return BregmanPrior(
        torch.exp,
        mean=constraints.positive,
        gradient=torch.exp,
        inverse=torch.log,
        conjugate=lambda x: torch.xlogy(x, x) - x,
    )


def exponential() -> BregmanPrior:
    """Values > 0: D = x / mu - ln(x / mu) - 1; g(s) = -ln(-s), s < 0."""
    return BregmanPrior(
        lambda s: -torch.log(-s),
        natural=constraints.less_than(0.0),
        mean=constraints.positive,
        gradient=lambda s: -1.0 / s,
        inverse=lambda x: -1.0 / x,
        conjugate=lambda x: -x.log() - 1.0,
    )


def keep_inside(domain: Constraint, value: Tensor, before: Tensor) -> Tensor:
    """A value that a step has moved out of its domain, put halfway between where it was and the bound."""
    while isinstance(domain, constraints.independent):
        domain = domain.base_constraint
    bound = getattr(domain, "upper_bound", getattr(domain, "lower_bound", None))
    if bound is None:
        return value
    return torch.where(domain.check(value), value, 0.5 * (before + bound))
