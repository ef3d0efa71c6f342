"""`Censored`: times known exactly, or to be after, before or between others; late entry."""

from __future__ import annotations

from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from hierfl.models.families.survival import hazards

ADDITIONS = ("cens", "upper", "entry")


def censored(base: str) -> str:
    """Return the likelihood of censored times that the expression of a distribution stands for.

    Args:
        base: expression of the distribution of times.
    """
    return f"families.Censored({base}, {', '.join(f'{a}=batch.{a}' for a in ADDITIONS)})"


class Censored(dist.TorchDistribution):
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
        cens: codes 0, 1, -1 or 2, to be broadcast to the batch shape. Default None: all times are
            exact.
        upper: upper ends of intervals; read where cens is 2 alone. Default None: no interval.
        entry: times >= 0 from which on the rows were under observation. Default None: 0.
        validate_args: whether to check values. Default None: Pyro's setting.

    Raises:
        TypeError: no cumulative hazard of the base is known.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = dist.constraints.positive

    def __init__(
        self,
        base: TorchDistributionMixin,
        cens: Tensor | None = None,
        upper: Tensor | None = None,
        entry: Tensor | None = None,
        *,
        validate_args: bool | None = None,
    ) -> None:
        hazards(base)  # refuses what it cannot censor
        fields = (cens, upper, entry)
        shape = torch.broadcast_shapes(
            base.batch_shape, *(f.shape for f in fields if f is not None)
        )
        self._set(base, fields, shape)
        super().__init__(shape, torch.Size(), validate_args=validate_args)

    def _set(self, base: Any, fields: tuple[Tensor | None, ...], shape: torch.Size) -> None:
        self.base = base.expand(shape)
        self.cens, self.upper, self.entry = (
            None if field is None else field.expand(shape) for field in fields
        )

    def expand(self, batch_shape: Any, _instance: Any = None) -> Censored:
        """Return the same distribution with a larger batch shape."""
        made: Any = self._get_checked_instance  # untyped in torch
        new: Censored = made(Censored, _instance)
        shape = torch.Size(batch_shape)
        new._set(self.base, (self.cens, self.upper, self.entry), shape)
        super(Censored, new).__init__(shape, torch.Size(), validate_args=False)
        new._validate_args = self._validate_args
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of each row in nats, of the batch shape.

        Args:
            value: times > 0: exact ones, or the ends of what is known of a censored one.
        """
        if self._validate_args:
            self._validate_sample(value)
        of = hazards(self.base)
        exact = of.log_density(value)
        entry = torch.zeros_like(exact) if self.entry is None else self.entry.to(exact.dtype)
        before = torch.zeros_like(exact) if self.entry is None else of.cumulative_hazard(entry)
        if self.cens is None:
            return exact + before
        left, between = self.cens == -1, self.cens == 2
        # rows that are no interval get one that is not empty: its unused gradient must be finite
        low = torch.where(left, entry, torch.where(between, value, 0.5 * value))
        high = value
        if self.upper is not None:
            high = torch.where(between, self.upper.to(value.dtype), value)
        inside = of.log_between(low, high)
        after = -of.cumulative_hazard(value)
        known = torch.where(self.cens == 1, after, exact)
        return torch.where(left | between, inside, known) + before

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return uncensored times beyond entry, (*sample_shape, *batch_shape)."""
        with torch.no_grad():
            of = hazards(self.base)
            like: Tensor = of.cumulative_hazard(torch.ones(()))
            passed = like.new_empty(self._extended_shape(torch.Size(sample_shape))).exponential_()
            if self.entry is None:
                return of.time_at(passed)
            entry = self.entry.to(like.dtype)
            # rounding of the inverse must not put a time before its entry
            return torch.maximum(of.time_at(of.cumulative_hazard(entry) + passed), entry)

    def _moments(self) -> tuple[Tensor, Tensor]:
        if self.entry is None:
            return self.base.mean, self.base.variance
        return hazards(self.base).moments_beyond(self.entry.to(torch.get_default_dtype()))

    @property
    def mean(self) -> Tensor:
        """Mean of the uncensored time given that it is beyond entry, of the batch shape."""
        return self._moments()[0]

    @property
    def variance(self) -> Tensor:
        """Variance of the uncensored time given that it is beyond entry, of the batch shape."""
        return self._moments()[1]
