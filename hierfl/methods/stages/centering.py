"""Coordinates in which numbers of Normal sites have one scale, whatever the sites are that scale them.

Rows that see a product, as of sigma and e with e ~ Normal(0, 1), tie e to 1 / sigma: a ridge that
trajectories cannot follow. Others' sds grow with a noise's scale. About the mode at s = mode of the other
sites, the rows' part h of the precision of a number e grows with s as e^(2 l), l = growth (s - mode):

    e = path(s) + (x - mode) scale(s),    scale(s)^-2 = 1 - h + h e^(2 l).

Where rows decide e, x is centered; where the prior does, it is as in the program; between, each is as
it is best, as in Gorinova, Moore and Hoffman 2020, arXiv:1906.03028. The path is the mode of e given
s: of a product mode e^l scale(s)^2, and what that leaves of its slope is taken as a line.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import least_squares_solution
from hierfl.methods.stages.modes import Slopes, curvature

MOST = 30.0  # of a growth, smoothly: numbers stay finite
REACH = 2.0  # sds of s, up to which modes drift with it
LEAST_MOVE = 0.2  # of s, whose scalars are mostly logs of scales; else its sd
POINTS = 2000  # at which slopes are computed for the growth, at most
CHANGE = 0.1  # of a growth over a move, from which it counts
SHARE = 0.02  # of the rows in a precision, from which they count


class Centering(NamedTuple):
    """How the leading K numbers move with those of other sites among them; K is 0 if none does."""

    mode: Tensor  # (K,)
    share: Tensor  # (K,), h
    growth: Tensor  # (K, K)
    product: Tensor  # (K,): 1 where the mode is that of a product
    drift: Tensor  # (K, K), of the mode beside
    reach: Tensor  # (K,), of what s drifts by: far away, where rows say nothing, modes stay

    def at(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the numbers (S, K...) at x (S, K...), and by how much the log of volume grows, (S,)."""
        if not len(self.mode):
            return x, 0.0
        leading, others = x.tensor_split([len(self.mode)], 1)
        path, log_scale = self._path(leading)
        moved = path + (leading - self.mode) * log_scale.exp()
        return torch.cat([moved, others], 1), log_scale.sum(1)

    def back(self, numbers: Tensor) -> Tensor:
        """Return x (S, K...) at numbers (S, K...)."""
        if not len(self.mode):
            return numbers
        leading, others = numbers.tensor_split([len(self.mode)], 1)
        path, log_scale = self._path(leading)
        return torch.cat([self.mode + (leading - path) * (-log_scale).exp(), others], 1)

    def _path(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the modes given s (S, K), and logs of scales (S, K), by x that has s."""
        away = x - self.mode
        growth = MOST * (away @ self.growth.mT / MOST).tanh()
        log_scale = -0.5 * (self.share * (2.0 * growth).expm1()).log1p()
        of_product = self.product * self.mode * (growth + 2.0 * log_scale).expm1()
        near = self.reach * (away / self.reach).tanh()
        return self.mode + of_product + near @ self.drift.mT, log_scale


def uncentered() -> Centering:
    """Return the coordinates of numbers as they are."""
    none = torch.zeros(0)
    return Centering(none, none, none[:, None], none, none[:, None], none)


def centering_of(
    slopes: Slopes, at: Tensor, sd: Tensor, prior: Tensor, inside: Tensor, outside: Tensor
) -> Centering:
    """Return how numbers move about a point.

    Args:
        slopes: of the log density.
        at: the point, (K,).
        sd: of all numbers, (K,).
        prior: precision of those inside by the prior, (P,).
        inside: places of those of Normal sites, (P,).
        outside: places of the others.
    """
    size = len(at)
    if not len(inside) or 4 * len(inside) * len(outside) > POINTS:
        return uncentered()
    here = curvature(slopes, at, torch.arange(size))
    own, across = here[inside][:, inside], here[inside][:, outside]
    response = -least_squares_solution(own, across)  # (P, U), of modes
    share = (1.0 - prior / own.diagonal()).nan_to_num().clamp(0.0, 1.0)
    growth = torch.zeros_like(response)
    for j, place in enumerate(outside.tolist()):
        away, move = torch.zeros(size), max(float(sd[place]), LEAST_MOVE)
        away[place], away[inside] = move, response[:, j] * move
        ends = [curvature(slopes, at + end, inside)[inside] for end in (-away, away)]
        less, more = (end.diagonal() - prior for end in ends)
        is_seen = torch.minimum(less, more) > SHARE * own.diagonal().abs()
        change = 0.5 * torch.where(is_seen, more / less, 1.0).log()
        growth[:, j] = torch.where(change.abs() > CHANGE, change, 0.0) / (2.0 * move)
    if not bool(growth.any()):
        return uncentered()
    of_product = (at[inside] * (1.0 - 2.0 * share))[:, None] * growth
    is_product = (response - of_product).square().sum(1) < response.square().sum(1)
    drift = response - is_product[:, None] * of_product
    cells = inside[:, None], outside
    none = torch.zeros(size)
    return Centering(
        at,
        none.index_put((inside,), share),
        torch.zeros(size, size).index_put(cells, growth),
        none.index_put((inside,), is_product.to(at)),
        torch.zeros(size, size).index_put(cells, drift),
        REACH * sd.clamp(min=LEAST_MOVE),
    )
