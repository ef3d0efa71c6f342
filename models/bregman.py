"""Bregman-divergence priors: the kernel exp(-lam D_{g*}(x, mu)) of a convex log-normalizer g.

The Gaussian, Bernoulli, Poisson and exponential families are built in.

An exponential family with log-normalizer g and natural parameter s has the mean mu = grad g(s);
conversely, s = grad g*(mu), where g* is the convex conjugate of g. Its scaled density is exp(-lam
D_{g*}(x, mu)) times factors that depend on x alone (Shi et al. 2023, arXiv:2310.09183, Eq. 4 to 6).
The priors here keep only the kernel, as the authors do. The kernel has the mode mu, and is Gaussian
for the Gaussian family and Gamma(lam + 1, lam / mu) for the exponential. These priors are for point
estimates (guide `delta`) and cannot be sampled.

Table 7 of the paper has misprints. Entries here are derived from g.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import constraints, transform_to
from torch.distributions.constraints import Constraint
from torch.func import grad, jacrev

from hierfl.core.arguments import spelled
from hierfl.program.sites import of_scalars

__all__ = ["BregmanPrior", "bernoulli", "exponential", "gaussian", "poisson"]

# Newton steps of `natural_of` without a closed form: damped far from the root, quadratic near it
NEWTON_STEPS = 40


@spelled
@dataclass(frozen=True, eq=False)
class BregmanPrior:
    """A family of priors, given by a strictly convex, twice differentiable log-normalizer g.

    g is separable if it is a sum of one term per number. It then returns those terms, in the shape
    of its argument.

    Args:
        g: maps natural parameters, in the shape of one tensor, to that same shape where g is
            separable, and to a scalar () where the entries interact.
        natural: domain of the natural parameters: all real numbers, or one side of a bound.
        mean: domain of the means, and so of the values x: the image of grad g.
        gradient: grad g in closed form. Default None: by autograd.
        inverse: grad g* = (grad g)^-1 in closed form. Default None: by Newton's method.
        conjugate: g* in closed form, with the output shape of g. Default None: <x, s> - g(s) at
            s = grad g*(x).

    >>> cosh = BregmanPrior(lambda s: torch.cosh(s))  # x^2 near 0, |x| log |x| far away
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
        """Return the mean mu = grad g(s) of natural parameters s, in their shape."""
        if self.gradient is not None:
            return self.gradient(natural)

        def total(s: Tensor) -> Tensor:
            return self.g(s).sum()

        return grad(total)(natural)

    def natural_of(self, mean: Tensor) -> Tensor:
        """Return the natural parameter s = grad g*(mu) of means, with exact derivatives."""
        if self.inverse is not None:
            return self.inverse(mean)
        at = transform_to(self.natural)(torch.zeros_like(mean))
        for _ in range(NEWTON_STEPS):
            at = self._newton(at.detach(), mean.detach(), damped=True)
        return self._newton(at.detach(), mean, damped=False)

    def _newton(self, at: Tensor, mean: Tensor, *, damped: bool) -> Tensor:
        """Take one Newton step on grad g(s) = mu; a damped step is at most 1 per entry."""
        residual = self.mean_of(at) - mean
        if self.separable(at):
            step = residual / self.curvature(at)
        else:
            step = (torch.linalg.inv(self.hessian(at)) @ residual.flatten()).view(at.shape)
        return keep_inside(self.natural, at - (step.clamp(-1.0, 1.0) if damped else step), at)

    def separable(self, like: Tensor) -> bool:
        """Return whether g is separable: whether g(like) has the shape of `like`."""
        return self.g(like).shape == like.shape

    def curvature(self, natural: Tensor) -> Tensor:
        """Return the diagonal of the Hessian of a separable g, in the shape of `natural`."""
        return grad(lambda s: self.mean_of(s).sum())(natural)

    def hessian(self, natural: Tensor) -> Tensor:
        """Return the Hessian of g, (d, d), over the d entries of `natural`, flattened."""
        shape = natural.shape

        def flat(s: Tensor) -> Tensor:
            return self.g(s.view(shape)).sum()

        # reverse over reverse mode, because forward mode is not always correct
        return jacrev(grad(flat))(natural.flatten())

    def _conjugate(self, x: Tensor) -> Tensor:
        if self.conjugate is not None:
            return self.conjugate(x)
        s = self.natural_of(x)
        product = x * s
        return product - self.g(s) if self.separable(s) else product.sum() - self.g(s)

    def divergence(self, x: Tensor, mean: Tensor) -> Tensor:
        """Return g*(x) - g*(mu) - <grad g*(mu), x - mu> >= 0, summed over x to ()."""
        return self.terms(x, mean).sum()

    def terms(self, x: Tensor, mean: Tensor) -> Tensor:
        """Return the divergence before summation: one term per entry if g is separable, else ()."""
        slope = self.natural_of(mean) * (x - mean)
        difference = self._conjugate(x) - self._conjugate(mean)
        return difference - (slope if difference.dim() else slope.sum())


@spelled
def gaussian(precision: float | Tensor = 1.0) -> BregmanPrior:
    """Return the Gaussian family, for real values.

        D = precision |x - mu|^2 / 2,    g(s) = s^2 / (2 precision)

    For correlated entries use `BregmanPrior(lambda s: 0.5 * s @ cov @ s)`.

    Args:
        precision: > 0, one for all entries or one for each entry of x.

    Raises:
        ValueError: `precision` is not > 0 everywhere.
    """
    p = torch.as_tensor(precision)
    if not bool((p > 0.0).all()):
        raise ValueError(f"precision is {precision}: it must be > 0")
    return BregmanPrior(
        lambda s: 0.5 * s.square() / precision,
        gradient=lambda s: s / precision,
        inverse=lambda x: x * precision,
        conjugate=lambda x: 0.5 * precision * x.square(),
    )


@spelled
def bernoulli() -> BregmanPrior:
    """Return the Bernoulli family, for values in (0, 1).

    D = x ln(x / mu) + (1 - x) ln((1 - x) / (1 - mu)),    g(s) = ln(1 + e^s)
    """
    return BregmanPrior(
        nn.functional.softplus,
        mean=constraints.unit_interval,
        gradient=torch.sigmoid,
        inverse=torch.logit,
        conjugate=lambda x: torch.xlogy(x, x) + torch.xlogy(1.0 - x, 1.0 - x),
    )


@spelled
def poisson() -> BregmanPrior:
    """Return the Poisson family, for values > 0.

    D = x ln(x / mu) - x + mu,    g(s) = e^s
    """
    return BregmanPrior(
        torch.exp,
        mean=constraints.positive,
        gradient=torch.exp,
        inverse=torch.log,
        conjugate=lambda x: torch.xlogy(x, x) - x,
    )


@spelled
def exponential() -> BregmanPrior:
    """Return the exponential family, for values > 0.

    D = x / mu - ln(x / mu) - 1,    g(s) = -ln(-s),  s < 0
    """
    return BregmanPrior(
        lambda s: -torch.log(-s),
        natural=constraints.less_than(0.0),
        mean=constraints.positive,
        gradient=lambda s: -1.0 / s,
        inverse=lambda x: -1.0 / x,
        conjugate=lambda x: -x.log() - 1.0,
    )


def keep_inside(domain: Constraint, value: Tensor, before: Tensor) -> Tensor:
    """Return values after a step; those outside a domain go halfway back to its bound."""
    domain = of_scalars(domain)
    bound = getattr(domain, "upper_bound", getattr(domain, "lower_bound", None))
    if bound is None:
        return value
    return torch.where(domain.check(value), value, 0.5 * (before + bound))
