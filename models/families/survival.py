"""Times by their hazards: exact, censored (after, before, between others), entered late."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import pyro.distributions as dist
import torch
import torch.distributions as torch_dist
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from hierfl.core.gaussians import log1mexp, log_normal_between, log_normal_cdf
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.rows import RowDistribution
from hierfl.models.priors import Prior

FAR = 1e4  # stands for infinity where a logarithm of time 0 is meant
DEEPEST = 700.0  # cumulative hazards above it are survival probabilities of 0 in double precision
ADDITIONS = ("cens", "upper", "entry")


@runtime_checkable
class Hazards(Protocol):
    """A distribution of times T > 0 in terms of its cumulative hazard H(t) = -log P(T > t)."""

    def log_density(self, time: Tensor) -> Tensor:
        """Return the log density at times > 0."""

    def cumulative_hazard(self, time: Tensor) -> Tensor:
        """Return H at times >= 0; it is 0 at time 0."""

    def log_between(self, low: Tensor, high: Tensor) -> Tensor:
        """Return log P(low < T <= high), with 0 <= low < high."""

    def time_at(self, hazard: Tensor) -> Tensor:
        """Return the times at which H has some values >= 0."""

    def moments_beyond(self, entry: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of T given T > entry."""


def hazards(fn: Any) -> Hazards:
    """Return the hazards of a distribution of times, which may have these methods itself."""
    if isinstance(fn, torch_dist.Exponential):
        return _ExponentialHazards(fn.rate)
    if isinstance(fn, torch_dist.Weibull):
        return _WeibullHazards(fn.scale, fn.concentration)
    if isinstance(fn, torch_dist.LogNormal):
        return _LogNormalHazards(fn.loc, fn.scale)
    if isinstance(fn, Hazards):
        return fn
    raise TypeError(
        f"a {type(fn).__name__} has no cumulative hazard: use an Exponential, a Weibull, a "
        "LogNormal or a PiecewiseExponential"
    )


@dataclass(frozen=True)
class _ExponentialHazards:
    """Constant hazards, per unit of time."""

    rate: Tensor

    def log_density(self, time: Tensor) -> Tensor:
        return self.rate.log() - self.rate * time

    def cumulative_hazard(self, time: Tensor) -> Tensor:
        return self.rate * time

    def log_between(self, low: Tensor, high: Tensor) -> Tensor:
        return log1mexp(self.rate * (high - low)) - self.rate * low

    def time_at(self, hazard: Tensor) -> Tensor:
        return hazard / self.rate

    def moments_beyond(self, entry: Tensor) -> tuple[Tensor, Tensor]:
        return entry + 1.0 / self.rate, (1.0 / self.rate**2).expand_as(entry + self.rate)


@dataclass(frozen=True)
class _WeibullHazards:
    """Hazards that are powers of time."""

    scale: Tensor
    shape: Tensor

    def log_density(self, time: Tensor) -> Tensor:
        log_hazard = self.shape * (time.log() - self.scale.log())
        return self.shape.log() - time.log() + log_hazard - log_hazard.exp()

    def cumulative_hazard(self, time: Tensor) -> Tensor:
        # log 0 is left out before the power, not after it: else the gradient at time 0 is nan
        there = time > 0.0
        log_time = torch.where(there, time, torch.ones_like(time)).log()
        hazard = (self.shape * (log_time - self.scale.log())).exp()
        return torch.where(there, hazard, torch.zeros_like(hazard))

    def log_between(self, low: Tensor, high: Tensor) -> Tensor:
        there = low > 0.0
        log_ratio = self.shape * (high.log() - torch.where(there, low, 0.5 * high).log())
        share = torch.where(there, log1mexp(log_ratio), torch.zeros_like(log_ratio))
        log_gap = self.shape * (high.log() - self.scale.log()) + share
        # a small gap may be 0 in single precision, where its logarithm is not
        small = log_gap < -12.0
        gap = torch.where(small, torch.ones_like(log_gap), log_gap).exp()
        near = log_gap - 0.5 * log_gap.clamp(max=0.0).exp()
        return torch.where(small, near, log1mexp(gap)) - self.cumulative_hazard(low)

    def time_at(self, hazard: Tensor) -> Tensor:
        return self.scale * hazard ** (1.0 / self.shape)

    def moments_beyond(self, entry: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance beyond entry, by the upper incomplete gamma function."""
        of, like = doubled(self), self.scale.dtype
        hazard = of.cumulative_hazard(entry.double())
        first = of.scale * _upper_gamma(1.0 + 1.0 / of.shape, hazard)
        second = of.scale**2 * _upper_gamma(1.0 + 2.0 / of.shape, hazard)
        return first.to(like), (second - first**2).clamp(min=0.0).to(like)


def _upper_gamma(a: Tensor, x: Tensor) -> Tensor:
    """Return exp(x) times the upper incomplete gamma function of (a, x), for a > 1 and x >= 0."""
    a, x = torch.broadcast_tensors(a, x)
    far = x > a + 100.0
    near = torch.where(far, torch.zeros_like(x), x)
    by_ratio = (torch.special.gammaincc(a, near).log() + torch.lgamma(a) + near).exp()
    beyond = torch.where(far, x, a + 101.0)
    term, total = torch.ones_like(x), torch.ones_like(x)
    for n in range(1, 12):  # the asymptotic series, whose terms fall by (a - n) / x
        term = term * (a - n) / beyond
        total = total + term
    return torch.where(far, beyond ** (a - 1.0) * total, by_ratio)


@dataclass(frozen=True)
class _LogNormalHazards:
    """Hazards of times whose logarithm is Normal."""

    loc: Tensor
    scale: Tensor

    def _standard(self, time: Tensor) -> Tensor:
        """Return (log t - loc) / scale, far below for time 0."""
        there = time > 0.0
        log_time = torch.where(there, time, torch.ones_like(time)).log()
        z = (log_time - self.loc) / self.scale
        return torch.where(there, z, torch.full_like(z, -FAR))

    def log_density(self, time: Tensor) -> Tensor:
        log_prob: Tensor = dist.LogNormal(self.loc, self.scale, validate_args=False).log_prob(time)
        return log_prob

    def cumulative_hazard(self, time: Tensor) -> Tensor:
        return -log_normal_cdf(-self._standard(time))

    def log_between(self, low: Tensor, high: Tensor) -> Tensor:
        return log_normal_between(self._standard(low), self._standard(high))

    def time_at(self, hazard: Tensor) -> Tensor:
        z = normal_at(hazard.double()).to(self.loc.dtype)
        return (self.loc + self.scale * z).exp()

    def moments_beyond(self, entry: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance beyond entry, by those of a truncated Normal."""
        of, like = doubled(self), self.loc.dtype
        z = of._standard(entry.double())
        survival = log_normal_cdf(-z)

        def moment(n: int) -> Tensor:
            above = log_normal_cdf(n * of.scale - z)
            return (n * of.loc + 0.5 * (n * of.scale) ** 2 + above - survival).exp()

        first = moment(1)
        return first.to(like), (moment(2) - first**2).clamp(min=0.0).to(like)


def normal_at(hazard: Tensor) -> Tensor:
    """Return z where Phi(-z) is exp(-H), in double precision."""
    deep = hazard.clamp(max=DEEPEST)
    low = torch.special.ndtri(-torch.expm1(-deep))  # exact where H is small, else the other is
    return torch.where(deep < 0.5, low, -torch.special.ndtri((-deep).exp()))


def doubled(of: Any) -> Any:
    """Return hazards in double precision."""
    return type(of)(*(getattr(of, field.name).double() for field in fields(of)))


def of_times(
    name: str,
    link: str,
    base: str,
    parameters: Callable[[Response], dict[str, Prior]],
    scale: Callable[[Response], tuple[float, float]],
    *,
    has_intercept: bool = True,
) -> ResponseFamily:
    """Return the family of times of a distribution's expression, which may be censored."""
    likelihood = f"families.Censored({base}, {', '.join(f'{a}=batch.{a}' for a in ADDITIONS)})"
    plain = ResponseFamily(name, link, "time", likelihood, parameters, scale, ADDITIONS)
    return replace(plain, has_intercept=has_intercept)


class Censored(RowDistribution):
    """Times T of which some are censored, or entered late.

    With survival S(t) = P(T > t), value v, entry e and upper end u, the density of a row is

        cens  0:  p(v) / S(e)             the time is v
        cens  1:  S(v) / S(e)             the time is after v
        cens -1:  (S(e) - S(v)) / S(e)    the time is before v, and after entry
        cens  2:  (S(v) - S(u)) / S(e)    the time is between v and u

    Codes are those of `cens()` in brms. A draw is the uncensored time, beyond entry; so are mean
    and variance.

    Args:
        base: distribution of the times: dist.Exponential, dist.Weibull, dist.LogNormal,
            `PiecewiseExponential`, or any with the methods of `Hazards`.
        cens: codes 0, 1, -1 or 2, or bool, true where the time is after v, which is twice as fast;
            to be broadcast to the batch shape. Default None: all times are exact.
        upper: upper ends of intervals; read where cens is 2 alone. Default None: no interval.
        entry: times >= 0 from which on the rows were under observation. Default None: 0.

    Raises:
        TypeError: no cumulative hazard of the base is known.
    """

    FIELDS = ("base", "cens", "upper", "entry")
    support = dist.constraints.positive

    def __init__(
        self,
        base: TorchDistributionMixin,
        cens: Tensor | None = None,
        upper: Tensor | None = None,
        entry: Tensor | None = None,
    ) -> None:
        hazards(base)  # refuses what it cannot censor
        fields = (cens, upper, entry)
        shape = torch.broadcast_shapes(
            base.batch_shape, *(f.shape for f in fields if f is not None)
        )
        self.base: Any = base.expand(shape)
        self.cens, self.upper, self.entry = (
            None if field is None else field.expand(shape) for field in fields
        )
        super().__init__(shape, torch.Size())

    def _log_prob(self, value: Tensor) -> Tensor:
        of = hazards(self.base)
        exact = of.log_density(value)
        entry = torch.zeros_like(exact) if self.entry is None else self.entry.to(exact.dtype)
        before = torch.zeros_like(exact) if self.entry is None else of.cumulative_hazard(entry)
        if self.cens is None:
            return exact + before
        after = -of.cumulative_hazard(value)
        if self.cens.dtype == torch.bool:
            return torch.where(self.cens, after, exact) + before
        before_value, between = self.cens == -1, self.cens == 2
        # rows that are no interval get one that is not empty: its unused gradient must be finite
        low = torch.where(before_value, entry, torch.where(between, value, 0.5 * value))
        high = value
        if self.upper is not None:
            high = torch.where(between, self.upper.to(value.dtype), value)
        inside = of.log_between(low, high)
        exact_or_after = torch.where(self.cens == 1, after, exact)
        return torch.where(before_value | between, inside, exact_or_after) + before

    def _draw(self) -> Tensor:
        """Return uncensored times beyond entry, of the batch shape."""
        of = hazards(self.base)
        like: Tensor = of.cumulative_hazard(torch.ones(()))
        passed = like.new_empty(self.batch_shape).exponential_()
        if self.entry is None:
            return of.time_at(passed)
        entry = self.entry.to(like.dtype)
        # rounding of the inverse must not put a time before its entry
        return torch.maximum(of.time_at(of.cumulative_hazard(entry) + passed), entry)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the uncensored time given that it is beyond entry."""
        if self.entry is None:
            return self.base.mean, self.base.variance
        return hazards(self.base).moments_beyond(self.entry.to(torch.get_default_dtype()))
