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

import pyro
import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import Transform
from torch.func import grad, jacrev

from hierfl.batch import ClientBatch
from hierfl.models.fields import field, observe
from hierfl.models.likelihood import Likelihood, categorical
from hierfl.models.modules import apply, frozen_copy, weights
from hierfl.recipes import recorded
from hierfl.sites import Model

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

        found: Tensor = jacrev(grad(flat))(natural.flatten())  # reverse over reverse: forward mode is not always right
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
        return BregmanPrior(lambda s: 0.5 * s.square(), conjugate=lambda x: 0.5 * x.square(), gradient=_same, inverse=_same)
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
        torch.exp, mean=constraints.positive, gradient=torch.exp, inverse=torch.log, conjugate=lambda x: torch.xlogy(x, x) - x
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


# ------------------------------------------------------------------------------------------------ in a Pyro program
class Means(Constraint):
    """Where the means of a prior lie; without its constraint such a value is its natural parameter."""

    event_dim = 0

    def __init__(self, prior: BregmanPrior) -> None:
        self.prior = prior
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        """Whether each number may be a mean."""
        return self.prior.mean.check(value)


class ToMean(Transform):
    """From natural parameters to means: grad g."""

    bijective = True

    def __init__(self, prior: BregmanPrior) -> None:
        self.prior, self.domain, self.codomain = prior, prior.natural, Means(prior)
        super().__init__()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToMean) and other.prior is self.prior

    def __hash__(self) -> int:
        return hash(id(self.prior))

    def _call(self, x: Tensor) -> Tensor:
        return self.prior.mean_of(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return self.prior.natural_of(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Log of the curvature of g where it is separable; NaN where it is not, since only points are inferred under such a g."""
        return self.prior.curvature(x).log() if self.prior.separable(x) else torch.full_like(x, torch.nan)


def _to_mean(domain: Means) -> Transform:
    return ToMean(domain.prior)


for _registry in (biject_to, transform_to):
    _registry.register(Means, _to_mean)


class BregmanKernel(TorchDistribution):
    """Log density -lam D_{g*}(x, mu) + const, of a tensor x.

    Args:
        prior: the family.
        loc: mu, (*event), the mode.
        lam: the concentration.
    """

    arg_constraints: dict[str, Constraint] = {}  # noqa: RUF012 (torch's name and kind)

    def __init__(self, prior: BregmanPrior, loc: Tensor, lam: float = 1.0, validate_args: bool | None = None) -> None:
        self.prior, self.loc, self.lam = prior, loc, lam
        super().__init__(torch.Size(), loc.shape, validate_args=validate_args)

    @property
    def support(self) -> Constraint:
        """Where means lie."""
        return constraints.independent(Means(self.prior), len(self.event_shape))

    @property
    def mean(self) -> Tensor:
        """The mode mu, where guides start: the mean of the family, though not of the kernel."""
        return self.loc

    def log_prob(self, value: Tensor) -> Tensor:
        """-lam D, of each event."""
        batch = value.shape[: value.dim() - len(self.event_shape)]
        each = value.reshape(-1, *self.event_shape)
        found = torch.vmap(lambda x: self.prior.divergence(x, self.loc))(each)
        return -self.lam * found.view(batch)

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """Refuse."""
        raise NotImplementedError("a Bregman kernel has no draws: infer its sites by the guide delta")


@recorded
def bregman_network(
    module: nn.Module,
    prior: BregmanPrior,
    *,
    link: Transform | None = None,
    likelihood: Likelihood | Callable[[Tensor], TorchDistributionMixin] | None = None,
    x: str = "x",
    y: str = "y",
) -> Model:
    """y_kn ~ likelihood(f(x_kn; link(v_k))),  v_k ~ exp(-D_{g*}(v_k, mu)) for each tensor, mu learned.

    What is learned and averaged are natural parameters: `theta.<tensor>` without its constraint, grad g*(mu).

    Args:
        module: takes the rows of a client, (B, ...), to (B, K) or (B,). Its values are where link(mu) starts.
        prior: `gaussian()`, `bernoulli()`, `poisson()`, `exponential()`, or one's own.
        link: from where the prior's values lie to the network's weights; None: logit for values in (0, 1), log for positive
            ones, and none for real ones.
        likelihood: from `hierfl.models.likelihood`. Default `categorical()`.
        x: the field that goes in.
        y: the field of labels.
    """
    net = frozen_copy(module)
    tensors = weights(net)
    to_weights = biject_to(prior.mean).inv if link is None else link
    given_output = likelihood if isinstance(likelihood, Likelihood) else Likelihood(likelihood) if likelihood else categorical()

    def bregman_network(batch: ClientBatch) -> None:
        label = given_output()
        theta = {n: pyro.param(f"theta.{n}", to_weights.inv(v), constraint=Means(prior)) for n, v in tensors.items()}
        with batch.clients():
            own = {n: to_weights(pyro.sample(f"w.{n}", BregmanKernel(prior, mu))) for n, mu in theta.items()}
            output = apply(net, own, {}, field(batch, x))
            with batch.data():
                observe(y, label(output), batch)

    return bregman_network
