"""Times by their hazards: what censoring and late entry need of a distribution of times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import pyro.distributions as dist
import torch
import torch.distributions as torch_dist
from torch import Tensor

from hierfl.models.families.links import log1mexp, log_normal_between, log_normal_cdf

FAR = 1e4  # stands for infinity where a logarithm of time 0 is meant
METHODS = ("log_density", "cumulative_hazard", "log_between", "time_at", "moments_beyond")
DEEPEST = 700.0  # cumulative hazards above it are survival probabilities of 0 in double precision


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
    """Return the hazards of a distribution of times, or itself where it has the methods of `Hazards`."""
    if isinstance(fn, torch_dist.Exponential):
        return ExponentialHazards(fn.rate)
    if isinstance(fn, torch_dist.Weibull):
        return WeibullHazards(fn.scale, fn.concentration)
    if isinstance(fn, torch_dist.LogNormal):
        return LogNormalHazards(fn)
    if all(
        hasattr(fn, name)
        for name in ("log_density", "cumulative_hazard", "time_at", "moments_beyond")
    ):
        return fn
    raise TypeError(
        f"a {type(fn).__name__} has no cumulative hazard: use an Exponential, a Weibull, a "
        "LogNormal or a PiecewiseExponential"
    )


@dataclass(frozen=True)
class ExponentialHazards:
    """Constant hazards, per unit of time."""

    rate: Tensor

    def log_density(self, time: Tensor) -> Tensor:
        """Return log rate - rate t."""
        return self.rate.log() - self.rate * time

    def cumulative_hazard(self, time: Tensor) -> Tensor:
        """Return rate t."""
        return self.rate * time

    def log_between(self, low: Tensor, high: Tensor) -> Tensor:
        """Return -H(low) + log(1 - exp(-(H(high) - H(low))))."""
        return log1mexp(self.rate * (high - low)) - self.rate * low

    def time_at(self, hazard: Tensor) -> Tensor:
        """Return H / rate."""
        return hazard / self.rate

    def moments_beyond(self, entry: Tensor) -> tuple[Tensor, Tensor]:
        """Return entry + 1 / rate and 1 / rate^2."""
        return entry + 1.0 / self.rate, (1.0 / self.rate**2).expand_as(entry + self.rate)


@dataclass(frozen=True)
class WeibullHazards:
    """Hazards that are powers of time."""

    scale: Tensor
    shape: Tensor

    def log_density(self, time: Tensor) -> Tensor:
        """Return log(shape / t) + log H - H."""
        log_hazard = self.shape * (time.log() - self.scale.log())
        return self.shape.log() - time.log() + log_hazard - log_hazard.exp()

    def cumulative_hazard(self, time: Tensor) -> Tensor:
        """Return (t / scale)^shape."""
        # log 0 is left out before the power, not after it: else the gradient at time 0 is nan
        there = time > 0.0
        log_time = torch.where(there, time, torch.ones_like(time)).log()
        found = (self.shape * (log_time - self.scale.log())).exp()
        return torch.where(there, found, torch.zeros_like(found))

    def log_between(self, low: Tensor, high: Tensor) -> Tensor:
        """Return -H(low) + log(1 - exp(-(H(high) - H(low)))), by the log of the difference."""
        there = low > 0.0
        apart = self.shape * (high.log() - torch.where(there, low, 0.5 * high).log())
        share = torch.where(there, log1mexp(apart), torch.zeros_like(apart))
        log_gap = self.shape * (high.log() - self.scale.log()) + share
        # a small gap may be 0 in single precision, where its logarithm is not
        small = log_gap < -12.0
        gap = torch.where(small, torch.ones_like(log_gap), log_gap).exp()
        near = log_gap - 0.5 * log_gap.clamp(max=0.0).exp()
        return torch.where(small, near, log1mexp(gap)) - self.cumulative_hazard(low)

    def time_at(self, hazard: Tensor) -> Tensor:
        """Return scale H^(1 / shape)."""
        return self.scale * hazard ** (1.0 / self.shape)

    def moments_beyond(self, entry: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance beyond entry, by the upper incomplete gamma function."""
        scale, shape, entry = (x.double() for x in (self.scale, self.shape, entry))
        hazard = WeibullHazards(scale, shape).cumulative_hazard(entry)
        first = scale * _upper_gamma(1.0 + 1.0 / shape, hazard)
        second = scale**2 * _upper_gamma(1.0 + 2.0 / shape, hazard)
        like = self.scale.dtype
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
class LogNormalHazards:
    """Hazards of times whose logarithm is Normal."""

    fn: Any

    def _standard(self, time: Tensor) -> Tensor:
        """Return (log t - loc) / scale, far below for time 0."""
        there = time > 0.0
        log_time = torch.where(there, time, torch.ones_like(time)).log()
        z: Tensor = (log_time - self.fn.loc) / self.fn.scale
        return torch.where(there, z, torch.full_like(z, -FAR))

    def log_density(self, time: Tensor) -> Tensor:
        """Return the log density of the distribution."""
        return self.fn.log_prob(time)

    def cumulative_hazard(self, time: Tensor) -> Tensor:
        """Return -log Phi(-z)."""
        return -log_normal_cdf(-self._standard(time))

    def log_between(self, low: Tensor, high: Tensor) -> Tensor:
        """Return log(Phi(z_high) - Phi(z_low))."""
        return log_normal_between(self._standard(low), self._standard(high))

    def time_at(self, hazard: Tensor) -> Tensor:
        """Return exp(loc + scale z), where Phi(-z) is exp(-H)."""
        deep = hazard.double().clamp(max=DEEPEST)
        low = torch.special.ndtri(
            -torch.expm1(-deep)
        )  # exact where H is small, the other where large
        z = torch.where(deep < 0.5, low, -torch.special.ndtri((-deep).exp()))
        return (self.fn.loc + self.fn.scale * z.to(self.fn.loc.dtype)).exp()

    def moments_beyond(self, entry: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance beyond entry, by those of a truncated Normal."""
        loc, scale = self.fn.loc.double(), self.fn.scale.double()
        z = LogNormalHazards(dist.LogNormal(loc, scale))._standard(entry.double())
        survival = log_normal_cdf(-z)

        def moment(n: int) -> Tensor:
            above = log_normal_cdf(n * scale - z)
            return (n * loc + 0.5 * (n * scale) ** 2 + above - survival).exp()

        first, like = moment(1), self.fn.loc.dtype
        return first.to(like), (moment(2) - first**2).clamp(min=0.0).to(like)
