"""How the curvature of clients' log likelihoods in their own scalars w moves with the global ones u.

A noise's scale and the slopes that multiply w change it by far more than the rows' own noise does:
with y ~ Normal(w, e^u) it is e^(-2 u). Along w(u) = center + drift (u - origin), as w moves with u, it
is taken as

    D(u) P D(u),    D_ii = e^(a_i / 2),    a = rates (u - origin),

with rates by differences of second differences of the log likelihoods. The slope there grows as
much: if it is g + G (u - origin) near the origin, it is taken as e^a (g + G (u - origin) - a g). Of a
noise's scale both are right. Of the u in a linear predictor the curvature is left as it is.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import Factor, times, times_one
from hierfl.summaries.factor import q_of
from hierfl.summaries.packed_rows import PackedRows

MOST = 20.0  # of a curvature's log, smoothly: numbers stay finite
DIFFERENCES = 1000  # entries of a client's rates, at most
# steps of w, in sds, and the least of u, whose scalars are mostly logs of scales
STEP, LEAST_MOVE = 0.5, 0.2
KNOWN = 1e4  # times the precision of u where it is nearly known
# what counts: share of a likelihood in a precision, and change of a curvature's log over two moves
SHARE, CHANGE = 0.05, 0.3


class Growth(NamedTuple):
    """Rates at which curvatures grow with u, along where w moves with it."""

    center: Tensor  # (N, W)
    slope: Tensor  # (N, W), g
    drift: Tensor  # (N, W, U), or (N, W, 0) where curvatures hardly move
    rates: Tensor  # (N, W, U), or (N, W, 0)
    origin: Tensor  # (U,), or (0,)

    @property
    def grows(self) -> bool:
        """Whether any curvature moves."""
        return len(self.origin) > 0

    def of(self, precision: Tensor, shift: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return precisions (N, W, W) and shifts (N, W) at u (U,), of those that do not grow."""
        away = u - self.origin
        center, growth = self.center + times_one(self.drift, away), times_one(self.rates, away)
        slope = shift - times(precision, center) - growth * self.slope
        growth = MOST * (growth / MOST).tanh()
        scales = (0.5 * growth).exp()
        precision = scales[..., None] * precision * scales[:, None]
        return precision, times(precision, center) + growth.exp() * slope


def no_growth(center: Tensor) -> Growth:
    """Return curvatures that do not move, about a center (N, W)."""
    none = center[..., None][..., :0]
    return Growth(center, torch.zeros_like(center), none, none, center[0, :0])


def at_origin(covariance: Tensor, growth: Growth) -> Tensor:
    """Return a belief's covariance (V, V) with those u nearly known by which curvatures move."""
    precision = torch.linalg.inv_ex(covariance).inverse
    moves = (growth.rates != 0.0).flatten(0, 1).any(0)
    known = torch.where(moves, KNOWN / covariance.diagonal()[-len(moves) :], 0.0)
    precision.diagonal()[-len(moves) :] += known
    return torch.linalg.inv_ex(precision).inverse


def growth_of(rows: PackedRows, belief: tuple[Tensor, Tensor], factor: Factor, size: int) -> Growth:
    """Return how curvatures grow about a belief of v, m (V,) and C (V, V), times clients' factors; `size` is W."""
    mean, precision = q_of((belief[0], torch.linalg.inv_ex(belief[1]).inverse), factor)
    sd = belief[1].diagonal()[size:].sqrt()
    center, origin = mean[:, :size], mean[:, size:].mean(0)
    moving = [j for j in (rows.line.rest - size).tolist() if j >= 0]
    if not 0 < size * len(moving) <= DIFFERENCES:
        return no_growth(center)
    inside, across = precision[:, :size].tensor_split([size], 2)
    covariance = torch.linalg.inv_ex(inside).inverse
    drift, rates = -covariance @ across, torch.zeros_like(across)
    step = torch.diag_embed(STEP * covariance.diagonal(dim1=1, dim2=2).clamp(min=0.0).sqrt())
    points = center[:, None] + torch.cat([0.0 * step[:, :1], step, -step], 1)  # (N, 1 + 2 W, W)

    def curvature(away: Tensor) -> Tensor:
        """Return minus second differences (N, W) at u, away from the origin."""
        w, u = points + times_one(drift, away)[:, None], origin + away
        values = rows.values(torch.cat([w, u.expand(*w.shape[:2], -1)], 2))
        here, above, below = values.split([1, size, size], 1)
        return 2.0 * here - above - below

    for j, move in zip(moving, sd[moving].clamp(min=LEAST_MOVE), strict=True):
        away = torch.zeros_like(origin)
        away[j] = move
        less, more = curvature(-away), curvature(away)
        seen = torch.minimum(less, more) > SHARE * STEP**2
        change = torch.where(seen, more / less, 1.0).log()
        rates[..., j] = torch.where(change.abs() > CHANGE, change, 0.0) / (2.0 * move)
    slope = (factor.shift - times(factor.precision, mean))[:, :size]
    moves = bool((rates != 0.0).any())
    return Growth(center, slope, drift, rates, origin) if moves else no_growth(center)
