"""Responses whose linear predictor is Normal: what a missing covariate makes of a family."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from torch import Tensor

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
            one, none = (_log_mean(weight, (each * fn.logits).sigmoid()) for each in (1.0, -1.0))
            return dist.Bernoulli(logits=one - none)
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


class OverNormal(dist.TorchDistribution):
    """A response with one value, averaged over a Normal linear predictor; see `over_normal`.

    Densities are sums over points about the mass of p(y | eta) Normal(eta), found in a few steps, in
    each of which the window shrinks to it: counts in the thousands leave a narrow one.

    Args:
        of: as in `over_normal`.
        loc: mean of the linear predictor, (...).
        scale: its standard deviation, above 0, (...).
        validate_args: whether to check values. Default None: Pyro's setting.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        of: Callable[[Tensor], Any],
        loc: Tensor,
        scale: Tensor,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.of, self.loc, self.scale = of, loc, scale
        super().__init__(loc.shape, torch.Size(), validate_args=validate_args)

    @property
    def support(self) -> Any:
        """That of the response at any linear predictor."""
        return self.of(self.loc).support

    def expand(self, batch_shape: Any, _instance: Any = None) -> OverNormal:
        """Return the same distribution with a larger batch shape."""
        made: Any = self._get_checked_instance  # untyped in torch
        new: OverNormal = made(OverNormal, _instance)
        new.of = self.of
        new.loc, new.scale = self.loc.expand(batch_shape), self.scale.expand(batch_shape)
        super(OverNormal, new).__init__(torch.Size(batch_shape), self.event_shape, False)
        new._validate_args = self._validate_args
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density in nats, of the batch shape.

        Args:
            value: of the response, of the batch shape.
        """
        if self._validate_args:
            self._validate_sample(value)
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
            found: Tensor = self.of(loc + scale * z).log_prob(value)
            return found - 0.5 * z**2 - 0.5 * math.log(2.0 * math.pi)

        center, half = torch.zeros_like(loc), torch.full_like(loc, WIDE)
        with torch.no_grad():
            for _ in range(STAGES):
                z = center + half * at
                share = density(z).nan_to_num(-math.inf, neginf=-math.inf).softmax(0)
                center = (share * z).sum(0)
                sd = (share * (z - center) ** 2).sum(0).sqrt()
                apart = 2.0 * half / (POINTS - 1)
                half = NEAR * torch.maximum(sd, 0.5 * apart)
        return density, center.detach(), half.detach()

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return draws without gradients, (*sample_shape, *batch_shape)."""
        with torch.no_grad():
            shape = torch.Size(sample_shape) + self.batch_shape
            unit = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
            found: Tensor = self.of(self.loc + self.scale * unit).sample()
            return found

    @property
    def mean(self) -> Tensor:
        """The mean, of the batch shape."""
        return self._moments()[0]

    @property
    def variance(self) -> Tensor:
        """The variance, of the batch shape."""
        return self._moments()[1]

    def _moments(self) -> tuple[Tensor, Tensor]:
        z, shares = _normal(MOMENTS, 0.6, self.loc)
        fn = self.of(self.loc + self.scale * _beside(z, self.loc))
        weight = _beside(shares, self.loc)
        mean = (weight * fn.mean).sum(0)
        return mean, (weight * (fn.variance + (fn.mean - mean) ** 2)).sum(0)
