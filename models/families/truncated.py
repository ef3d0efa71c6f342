"""Responses of which only those between two bounds were recorded."""

import math
from dataclasses import replace
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as torch_dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from hierfl.core.gaussians import log1mexp, log_normal_between, log_normal_cdf
from hierfl.models.families.family import ResponseFamily
from hierfl.models.families.rows import RowDistribution
from hierfl.models.families.survival import doubled, hazards, normal_at
from hierfl.program.sites import recorded

REALS = ("gaussian",)
TIMES = ("exponential", "lognormal", "weibull")
COUNTS = ("negative_binomial", "poisson")
MOST = 1000  # counts between two bounds
HIGHEST = 100  # lower bound of counts that have no upper one
BEYOND = 200  # counts above such a bound that matter for moments where few lie above it
RARE, LEVELS = 1e-6, 32  # of a tail, and of the fraction that it is then taken from
STEP, NODES = 0.25, 89  # of standard normal quantiles, from -8 to 14


@recorded
def truncated(
    family: ResponseFamily, low: float = -math.inf, high: float = math.inf
) -> ResponseFamily:
    """Return a family of which only responses between two bounds were recorded, both included.

        p(y) = p_family(y) / P_family(low <= y <= high)

    In a formula it is `y | trunc(lb=0, ub=10)`. Means, draws and scores are those of responses
    between the bounds, as in brms.

    Args:
        family: gaussian, exponential, lognormal, weibull, poisson or negative_binomial.
        low: lower bound. Default: none.
        high: upper bound. Default: none.

    Raises:
        ValueError: the family is another, or the bounds do not fit it.

    >>> from hierfl.models.families import poisson
    >>> truncated(poisson(), low=1).likelihood
    'families.Truncated(dist.Poisson(eta.exp()), low=1.0)'
    """
    name = family.name
    if name not in (*REALS, *TIMES, *COUNTS):
        raise ValueError(
            f"family '{name}' cannot be truncated, since its distribution function is not "
            f"computed: take {', '.join((*REALS, *TIMES, *COUNTS))}, or leave trunc() out"
        )
    if name in TIMES:
        low = max(float(low), 0.0) or -math.inf
    if name in COUNTS:
        low = max(math.ceil(low), 0) or -math.inf if low > -math.inf else low
        high = math.floor(high) if high < math.inf else high
    if problem := _problem_of_bounds(name, float(low), float(high)):
        raise ValueError(problem)
    bounds = {"low": float(low), "high": float(high)}
    words = "".join(f", {key}={value!r}" for key, value in bounds.items() if math.isfinite(value))
    if not words:
        return family
    return replace(
        family,
        name=f"truncated_{name}",
        likelihood=f"families.Truncated({family.expression()}{words})",
        additions=(),
        bounds=(float(low), float(high)),
    )


def _problem_of_bounds(name: str, low: float, high: float) -> str | None:
    """Return what is wrong with bounds: nothing, or too many counts, lie between them; or None."""
    if not (low < high or (low == high and name in COUNTS)):
        return f"the bounds are {low:g} and {high:g}: the first must be below the second"
    if name in TIMES and high <= 0.0:
        return f"the upper bound of family '{name}' is {high:g}: it must be above 0"
    if name not in COUNTS:
        return None
    if high < 0.0 or (high - max(low, 0.0) >= MOST and high < math.inf):
        return (
            f"the upper bound of family '{name}' is {high:g}: it must be 0 or more, and less than "
            f"{MOST} above the lower one; leave it out where no count comes near it"
        )
    if low > HIGHEST and high == math.inf:
        return (
            f"the lower bound of family '{name}' is {low:g}: without an upper one it goes up to "
            f"{HIGHEST}; give ub= too, beyond all counts that there may be"
        )
    return None


class Truncated(RowDistribution):
    """A distribution given that the value lies between two bounds, both included.

    Args:
        base: dist.Normal, dist.Exponential, dist.Weibull, dist.LogNormal, dist.Poisson or
            dist.NegativeBinomial.
        low: lower bound. Default: none.
        high: upper bound. Default: none.

    Raises:
        TypeError: the base is another.
    """

    FIELDS = ("base",)

    def __init__(self, base: Any, low: float = -math.inf, high: float = math.inf) -> None:
        self.base, self.low, self.high = base, low, high
        if not (self.is_count or isinstance(base, torch_dist.Normal)):
            hazards(base)  # refuses what it does not know
        super().__init__(base.batch_shape, torch.Size())

    @property
    def is_count(self) -> bool:
        """Whether the base is one of counts."""
        return isinstance(self.base, torch_dist.Poisson | torch_dist.NegativeBinomial)

    @property
    def support(self) -> Any:
        """That of the base: `ResponseFamily.check` refuses rows beyond the bounds."""
        return self.base.support

    def _log_prob(self, value: Tensor) -> Tensor:
        log_prob: Tensor = self.base.log_prob(value)
        return log_prob - self.log_mass.to(log_prob.dtype)

    @property
    def log_mass(self) -> Tensor:
        """The log probability of the base between the bounds, of the batch shape."""
        if self.is_count:
            return _log_mass_of_counts(_double(self.base), self.low, self.high)
        if isinstance(self.base, torch_dist.Normal):
            low, high = ((at - self.base.loc) / self.base.scale for at in (self.low, self.high))
            if self.high == math.inf:
                return log_normal_cdf(-low)
            return log_normal_cdf(high) if self.low == -math.inf else log_normal_between(low, high)
        of, like = hazards(self.base), torch.zeros(self.batch_shape)
        low = like + max(self.low, 0.0)
        if self.high == math.inf:
            return -of.cumulative_hazard(low)
        return of.log_between(low, like + self.high)

    def _draw(self) -> Tensor:
        if self.is_count:
            return _counts(self)
        return _Continuous(self).at(torch.randn(self.batch_shape, dtype=torch.float64))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of what lies between the bounds."""
        if self.is_count:
            mean, variance = _moments_of_counts(_double(self.base), self.low, self.high)
            return mean.to(self.base.mean.dtype), variance.to(self.base.mean.dtype)
        if self.high == math.inf and not isinstance(self.base, torch_dist.Normal):
            low = torch.full(self.batch_shape, self.low)
            return hazards(self.base).moments_beyond(low)
        return _Continuous(self).moments()


class _Continuous:
    """The quantiles of a truncated continuous distribution, by the survival above its lower bound."""

    def __init__(self, fn: Truncated) -> None:
        self.fn, base = fn, fn.base
        self.is_normal = isinstance(base, torch_dist.Normal)
        if self.is_normal:
            self.loc, self.scale = base.loc.double(), base.scale.double()
            low, high = ((at - self.loc) / self.scale for at in (fn.low, fn.high))
            # intervals below the mean are turned over, so that small probabilities stay exact
            self.flip = low + high < 0.0
            low, high = torch.where(self.flip, -high, low), torch.where(self.flip, -low, high)
            self.start = -log_normal_cdf(-low)  # a cumulative hazard
            self.gap = log_normal_cdf(-low) - log_normal_cdf(-high)
            return
        self.of = doubled(hazards(base))
        low = torch.full(fn.batch_shape, max(fn.low, 0.0), dtype=torch.float64)
        self.start = self.of.cumulative_hazard(low)
        inside = self.of.log_between(low, torch.full_like(low, fn.high)) + self.start
        self.gap = -log1mexp(-inside)

    def at(self, z: Tensor) -> Tensor:
        """Return the values whose probability below is that of a standard normal z."""
        near = -torch.log1p(torch.special.ndtr(z) * torch.expm1(-self.gap))
        far = -torch.logaddexp(log_normal_cdf(-z), log_normal_cdf(z) - self.gap)
        hazard = self.start + torch.where(self.gap < 1.0, near, far)
        if not self.is_normal:
            value = self.of.time_at(hazard)
        else:
            x = normal_at(hazard)
            value = self.loc + self.scale * torch.where(self.flip, -x, x)
        return value.clamp(self.fn.low, self.fn.high).to(self.fn.base.mean.dtype)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance, by sums over normal quantiles."""
        first = second = total = torch.zeros((), dtype=torch.float64)
        center = self.at(torch.zeros((), dtype=torch.float64)).double()
        for node in range(NODES):
            z = torch.tensor(node * STEP - 8.0, dtype=torch.float64)
            weight, away = (-0.5 * z**2).exp(), self.at(z).double() - center
            first, second = first + weight * away, second + weight * away**2
            total = total + weight
        mean, like = first / total, self.fn.base.mean.dtype
        return (center + mean).to(like), (second / total - mean**2).clamp(min=0.0).to(like)


def _double(base: Any) -> Any:
    """Return a distribution of counts in double precision, in which 1 - P keeps its digits."""
    if isinstance(base, torch_dist.Poisson):
        return dist.Poisson(base.rate.double(), validate_args=False)
    made: Any = type(base)  # NegativeBinomial of families, whose log probability is exact
    return made(base.total_count.double(), logits=base.logits.double(), validate_args=False)


def _between(base: Any, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return counts from low to high, (n, 1, ...), and their log probabilities, (n, *batch)."""
    count = torch.arange(int(max(low, 0)), int(high) + 1, dtype=torch.float64)
    count = count.view(-1, *[1] * len(base.batch_shape))
    first = base.log_prob(count[:1])
    # each from the one before: derivatives of log gamma functions take ten times as long
    if isinstance(base, torch_dist.Poisson):
        steps = base.rate.log() - count[1:].log()
    else:
        steps = (base.total_count + count[:-1]).log() - count[1:].log() + logsigmoid(base.logits)
    return count, torch.cat([first, first + steps.cumsum(0)])


def _log_mass_of_counts(base: Any, low: float, high: float) -> Tensor:
    if high < math.inf:
        return _between(base, low, high)[1].logsumexp(0)
    below = _between(base, 0, low - 1)[1].logsumexp(0)
    if low <= 1.0:
        return log1mexp(-below)
    rare = below > math.log1p(-RARE)
    return torch.where(rare, _log_above(base, low), log1mexp((-below).masked_fill(rare, 1.0)))


def _log_above(base: Any, low: float) -> Tensor:
    """Return log P(Y >= low) where the mean is below `low`, else a finite number.

    P(Y >= low) is P(Y = low) times a series, of a negative binomial the continued fraction of the
    incomplete beta function (https://dlmf.nist.gov/8.17.E22).
    """
    first, total = base.log_prob(torch.full(base.batch_shape, low)), torch.ones(())
    if isinstance(base, torch_dist.Poisson):
        rate = base.rate.clamp(max=low)
        for k in range(2 * LEVELS, 0, -1):
            total = 1.0 + rate / (low + k) * total
        return first + total.log()
    r = base.total_count
    p = torch.minimum(base.logits, (low / r).log()).sigmoid()
    for k in range(LEVELS, 0, -1):
        m = k // 2
        numerator = (low + m) * (low + r + m) if k % 2 else m * (m - r)
        total = 1.0 - numerator / ((low + k) * (low + k - 1)) * p / total
    return first - total.log()


def _moment(base: Any, low: float, high: float, n: int) -> Tensor:
    """Return the sum of count^n times its probability, over counts from low to high."""
    count, log_prob = _between(base, low, high)
    return (count**n * log_prob.exp()).sum(0)


def _moments_of_counts(base: Any, low: float, high: float) -> tuple[Tensor, Tensor]:
    mass = _log_mass_of_counts(base, low, high).exp()

    def moment(n: int) -> Tensor:
        if high < math.inf:
            return _moment(base, low, high, n) / mass
        whole = base.mean if n == 1 else base.variance + base.mean**2
        common = (whole - _moment(base, 0, low - 1, n)) / mass
        return torch.where(mass < RARE, _moment(base, low, low + BEYOND, n) / mass, common)

    mean = moment(1)
    return mean, (moment(2) - mean**2).clamp(min=0.0)


def _counts(fn: Truncated) -> Tensor:
    """Draw counts: again and again from the base, and one after another where few lie between the bounds."""
    mass = fn.log_mass.exp()
    drawn: Tensor = fn.base.sample()
    outside = (drawn < fn.low) | (drawn > fn.high)
    often = mass > 1e-3
    while bool((outside & often).any()):
        again = fn.base.sample()
        drawn = torch.where(outside & often, again, drawn)
        outside = outside & ~(often & (again >= fn.low) & (again <= fn.high))
    base, count = _double(fn.base), max(fn.low, 0.0)
    remaining = torch.rand_like(mass) * mass if bool(outside.any()) else mass
    while bool(outside.any()):
        remaining = remaining - base.log_prob(torch.full_like(mass, count)).exp()
        taken = outside & ((remaining <= 0.0) | (count >= min(fn.high, max(fn.low, 0.0) + 1000.0)))
        drawn = torch.where(taken, torch.full_like(drawn, count), drawn)
        outside = outside & ~taken
        count += 1.0
    return drawn
