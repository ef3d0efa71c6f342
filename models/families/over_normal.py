"""Responses whose linear predictor is Normal: what a missing covariate makes of a family."""

import math
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.models.families.rows import RowDistribution

STEP, NODES = 0.75, 15  # of standard normal quantiles for probabilities, from -5.25 to 5.25
MOMENTS = 31  # for moments, from -9 to 9
POINTS = 33  # of a window about the mass; it is found in STAGES, each with
FINE = 129  # of the same window, to draw from
WIDE, STAGES, NEAR = 40.0, 5, 8.0  # half the width of the first window, and sds of later ones
TINY = 1e-8  # variance that keeps derivatives at 0, where sqrt has none


def over_normal(of: Callable[[Tensor], Any], loc: Tensor, variance: Tensor) -> Any:
    """Return a response's distribution, averaged over a Normal linear predictor.

        p(y) = integral of p(y | eta) Normal(eta; loc, sqrt(variance)) d eta

    It is a Bernoulli, or a Categorical of levels in order, if those of `of` are; integrals are sums
    over evenly spaced points.

    Args:
        of: linear predictor (...) -> distribution of the response.
        loc: mean of the linear predictor, (...).
        variance: its variance, 0 or more, (...).

    >>> fn = over_normal(lambda eta: dist.Poisson(eta.exp()), torch.zeros(1), torch.ones(1))
    >>> round(fn.mean.item(), 4)  # exp(1 / 2)
    1.6487
    """
    loc, variance = torch.broadcast_tensors(loc, variance)
    scale = (variance + TINY).sqrt()
    z, weight = _normal(NODES, STEP, loc)
    first = of(loc)
    if isinstance(first, dist.Bernoulli | dist.Categorical):
        fn = of(loc + scale * _beside(z, loc))
        if isinstance(first, dist.Bernoulli):
            yes, no = (_log_mean(weight, (sign * fn.logits).sigmoid()) for sign in (1.0, -1.0))
            return dist.Bernoulli(logits=yes - no)
        return dist.Categorical(logits=_log_mean(weight, fn.probs))
    return OverNormal(of, loc, scale)


def _normal(count: int, step: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return evenly spaced points, (count,), and the shares of a standard Normal at them."""
    z = (torch.arange(count, dtype=like.dtype, device=like.device) - count // 2) * step
    return z, (-0.5 * z**2).softmax(0)


def _log_mean(weight: Tensor, probs: Tensor) -> Tensor:
    """Return the log of the weighted mean of probabilities (n, ...), (...)."""
    return torch.tensordot(weight, probs, 1).clamp(min=torch.finfo(probs.dtype).tiny).log()


def _beside(values: Tensor, like: Tensor) -> Tensor:
    """Return values (n,) as (n, 1, ...), to go with a tensor behind them."""
    return values.view(-1, *[1] * like.dim())


def _unit(count: int, like: Tensor) -> Tensor:
    """Return evenly spaced points from -1 to 1, (count, 1, ...), to go with a tensor behind them."""
    unit = torch.linspace(-1.0, 1.0, count, dtype=like.dtype, device=like.device)
    return _beside(unit, like)


class OverNormal(RowDistribution):
    """A response with one value, averaged over a Normal linear predictor; see `over_normal`.

    Densities are sums over points about the mass of p(y | eta) Normal(eta), found in a few steps, in
    each of which the window shrinks to it: counts in the thousands leave a narrow one.

    Args:
        of: as in `over_normal`.
        loc: mean of the linear predictor, (...).
        scale: its standard deviation, above 0, (...).
    """

    FIELDS = ("loc", "scale")

    def __init__(self, of: Callable[[Tensor], Any], loc: Tensor, scale: Tensor) -> None:
        self.of, self.loc, self.scale = of, loc, scale
        super().__init__(loc.shape, torch.Size())

    @property
    def support(self) -> Any:
        """That of the response at any linear predictor."""
        return self.of(self.loc).support

    def _log_prob(self, value: Tensor) -> Tensor:
        density, center, half = self._about_the_mass(value)
        z = center + half * _unit(POINTS, center)
        return density(z).logsumexp(0) + (2.0 * half / (POINTS - 1)).log()

    def standardized(self, value: Tensor, uniforms: Tensor) -> Tensor:
        """Draw z of the linear predictor, loc + scale z, given the response, of the batch shape.

            z ~ p(value | loc + scale z) Normal(z; 0, 1)

        The density is linear between points an eighth of its sd apart.

        Args:
            value: of the response, of the batch shape.
            uniforms: what is drawn with, in (0, 1), (2, ...).
        """
        density, center, half = self._about_the_mass(value)
        unit = _unit(FINE, center)
        logs = density(center + half * unit).nan_to_num(-math.inf, neginf=-math.inf)
        share = logs.softmax(0).cumsum(0)
        first, second = torch.broadcast_tensors(*uniforms, center)[:2]
        at = (share < first * share[-1]).sum(0).clamp(max=FINE - 1)
        # on a triangle about the point
        aside = torch.where(
            second < 0.5, (2.0 * second).sqrt() - 1.0, 1.0 - (2.0 - 2.0 * second).sqrt()
        )
        return center + half * (unit.reshape(-1)[at] + 2.0 * aside / (FINE - 1))

    def _about_the_mass(self, value: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Return the log density of z and the response, and the window of z with its mass: center, half width."""
        value, loc, scale = torch.broadcast_tensors(value, self.loc, self.scale)
        at = _unit(POINTS, loc)

        def density(z: Tensor) -> Tensor:
            log_prob: Tensor = self.of(loc + scale * z).log_prob(value)
            return log_prob - 0.5 * z**2 - 0.5 * math.log(2.0 * math.pi)

        center, half = torch.zeros_like(loc), torch.full_like(loc, WIDE)
        with torch.no_grad():
            for _ in range(STAGES):
                z = center + half * at
                share = density(z).nan_to_num(-math.inf, neginf=-math.inf).softmax(0)
                center = (share * z).sum(0)
                sd = (share * (z - center) ** 2).sum(0).sqrt()
                half = NEAR * torch.maximum(sd, half / (POINTS - 1))
        return density, center.detach(), half.detach()

    def _draw(self) -> Tensor:
        drawn: Tensor = self.of(self.loc + self.scale * torch.randn_like(self.loc)).sample()
        return drawn

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance, of the batch shape."""
        z, shares = _normal(MOMENTS, 0.6, self.loc)
        fn = self.of(self.loc + self.scale * _beside(z, self.loc))
        weight = _beside(shares, self.loc)
        mean = (weight * fn.mean).sum(0)
        return mean, (weight * (fn.variance + (fn.mean - mean) ** 2)).sum(0)
