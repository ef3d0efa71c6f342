"""`Censored`: times seen exactly, or known to be after, before or between others, and entered late."""

from __future__ import annotations

from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from hierfl.models.families.links import log1mexp
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

    Codes are those of `cens()` in brms. A draw is the uncensored time, beyond entry; so are mean and variance.

    Args:
        base: distribution of the times: dist.Exponential, dist.Weibull, dist.LogNormal,
            `PiecewiseExponential`, or any with the methods of `Hazards`.
        cens: codes 0, 1, -1 or 2, to be broadcast to the batch shape. Default None: all times are exact.
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
        at_entry = torch.zeros_like(exact)
        if self.entry is not None:
            at_entry = of.cumulative_hazard(self.entry.to(exact.dtype))
        if self.cens is None:
            return exact + at_entry
        cens, until = self.cens, of.cumulative_hazard(value)
        left, between = cens == -1, cens == 2
        low, high = torch.where(left, at_entry, until), until
        if self.upper is not None:
            # the upper end of other rows may be anything, nan too, and must not reach a gradient
            end = torch.where(between, self.upper.to(value.dtype), value)
            high = torch.where(between, of.cumulative_hazard(end), until)
        # rows that are no interval get any gap > 0, so that its logarithm has a finite gradient
        gap = torch.where(left | between, high - low, torch.ones_like(high))
        inside = -low + log1mexp(gap)
        found = torch.where(left | between, inside, torch.where(cens == 1, -until, exact))
        return found + at_entry

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
