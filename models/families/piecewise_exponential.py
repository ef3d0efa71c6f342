"""Times with a hazard that is constant between breaks."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.core.gaussians import log1mexp
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import log_scale, unit_scale
from hierfl.models.families.rows import RowDistribution
from hierfl.models.families.survival import of_times
from hierfl.models.priors import Prior
from hierfl.program.sites import recorded


@recorded
def piecewise_exponential(breaks: tuple[float, ...]) -> ResponseFamily:
    """Return the family of times whose baseline hazard is constant between breaks.

        hazard(t) = exp(eta + log_hazard_j)    for breaks_{j - 1} <= t < breaks_j,  j = 1, ..., J
        log_hazard_j ~ StudentT(3, -log(mean(y)), 2.5)

    eta is a log hazard ratio, and the baseline hazards take the intercept's place. Times may be
    censored or entered late (`Censored`): the row fields "cens", "upper" and "entry".

    Args:
        breaks: J - 1 times > 0, increasing, in the unit of the response.

    Raises:
        ValueError: breaks do not increase from above 0.

    >>> piecewise_exponential((1.0, 2.0)).expression()
    'families.PiecewiseExponential(eta, log_hazard, breaks=(1.0, 2.0))'
    """
    times = tuple(float(time) for time in breaks)
    check_breaks(times)
    base = f"families.PiecewiseExponential(eta, log_hazard, breaks={times})"

    def parameters(response: Response) -> dict[str, Prior]:
        # one event a unit of follow-up as long as the mean time
        center = -log_scale(response)[0] if math.isfinite(response.mean) else 0.0
        prior = dist.StudentT(3.0, center, 2.5)
        return {"log_hazard": prior.expand([len(times) + 1]).to_event(1)}

    of = "piecewise_exponential", "log", base, parameters, unit_scale
    return replace(of_times(*of, has_intercept=False), edges=times)


class PiecewiseExponential(RowDistribution):
    """Times whose hazard is constant between breaks, multiplied by exp(eta).

        hazard(t) = exp(eta + log_hazard_j)    for breaks_{j - 1} <= t < breaks_j

    Args:
        eta: log hazard ratio, of any shape.
        log_hazard: (J,) logarithms of the baseline hazards, per unit of time.
        breaks: J - 1 times > 0, increasing. The last hazard holds from the last break on.

    Raises:
        ValueError: breaks do not increase from above 0, or there is not one hazard more than
            breaks.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "eta": dist.constraints.real,
        "log_hazard": dist.constraints.real_vector,
    }
    support = dist.constraints.positive
    FIELDS = ("eta", "log_hazard")

    def __init__(self, eta: Tensor, log_hazard: Tensor, breaks: tuple[float, ...]) -> None:
        check_breaks(breaks)
        if log_hazard.shape[-1] != len(breaks) + 1:
            raise ValueError(
                f"log_hazard has {log_hazard.shape[-1]} entries for {len(breaks)} breaks: give one more than breaks"
            )
        shape = torch.broadcast_shapes(eta.shape, log_hazard.shape[:-1])
        self.eta = eta.expand(shape)
        self.log_hazard = log_hazard.expand(*shape, log_hazard.shape[-1])
        self.breaks = tuple(breaks)
        super().__init__(shape, torch.Size())

    def _starts(self) -> Tensor:
        return self.eta.new_tensor((0.0, *self.breaks))

    def _hazard(self) -> Tensor:
        return (self.eta[..., None] + self.log_hazard).exp()

    def _steps(self) -> Tensor:
        """Return the cumulative hazards at the starts, (..., J)."""
        starts = self._starts()
        steps = self._hazard()[..., :-1] * (starts[1:] - starts[:-1])
        return torch.nn.functional.pad(steps.cumsum(-1), (1, 0))

    def _piece(self, time: Tensor) -> Tensor:
        """Return one-hot rows of the piece that times lie in, (..., J) bool."""
        starts = self._starts()
        after = time[..., None] >= starts
        before = time[..., None] < torch.nn.functional.pad(starts[1:], (0, 1), value=math.inf)
        return after & before

    def cumulative_hazard(self, time: Tensor) -> Tensor:
        """Return H at times >= 0."""
        starts = self._starts()
        inside = (time[..., None] - starts).clamp(min=0.0)
        length = torch.nn.functional.pad(starts[1:] - starts[:-1], (0, 1), value=math.inf)
        return (self._hazard() * torch.minimum(inside, length)).sum(-1)

    def log_between(self, low: Tensor, high: Tensor) -> Tensor:
        """Return log P(low < T <= high), with 0 <= low < high."""
        until = self.cumulative_hazard(low)
        return log1mexp(self.cumulative_hazard(high) - until) - until

    def log_density(self, time: Tensor) -> Tensor:
        """Return the log density at times > 0."""
        level = torch.where(self._piece(time), self.log_hazard, self.eta.new_zeros(())).sum(-1)
        return self.eta + level - self.cumulative_hazard(time)

    def _log_prob(self, value: Tensor) -> Tensor:
        return self.log_density(value)

    def time_at(self, hazard: Tensor) -> Tensor:
        """Return the times at which H has some values >= 0."""
        steps = self._steps()
        piece = (hazard[..., None] >= steps).sum(-1, keepdim=True) - 1
        shape = (*piece.shape[:-1], steps.shape[-1])
        start, reached, rate = (
            x.expand(shape).gather(-1, piece)[..., 0]
            for x in (self._starts(), steps, self._hazard())
        )
        return start + (hazard - reached) / rate

    def _draw(self) -> Tensor:
        return self.time_at(torch.empty_like(self.eta).exponential_())

    def moments_beyond(self, entry: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the time given that it is beyond entry, piece by piece."""
        starts, rate = self._starts().double(), self._hazard().double()
        entry = entry.double()[..., None]
        waited = (starts - entry).clamp(min=0.0)  # residual time at which each piece is reached
        ends = torch.nn.functional.pad(starts[1:], (0, 1), value=math.inf)
        length = (ends - torch.maximum(starts, entry)).clamp(min=0.0)
        hazard = rate * length
        before = torch.nn.functional.pad(hazard[..., :-1].cumsum(-1), (1, 0))
        lost = torch.exp(-hazard)
        # integrals of S(t) dt and of residual time x S(t) dt over a piece, given survival
        finite = torch.where(length.isfinite(), length, torch.zeros_like(length))
        area = -torch.expm1(-hazard) / rate
        moment = (area - finite * lost) / rate + waited * area
        alive = torch.exp(-before)
        mean = (alive * area).sum(-1)
        second = 2.0 * (alive * moment).sum(-1)
        like = self.eta.dtype
        return (mean + entry[..., 0]).to(like), (second - mean**2).clamp(min=0.0).to(like)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance, of the batch shape."""
        return self.moments_beyond(torch.zeros_like(self.eta))


def check_breaks(breaks: tuple[float, ...]) -> None:
    """Refuse breaks that do not increase from above 0."""
    ends = pairwise((0.0, *breaks, math.inf))
    if not breaks or any(not low < high for low, high in ends):
        raise ValueError(
            f"breaks are {tuple(breaks)}: give one or more times above 0 that increase, such as (1.0, 2.0)"
        )
