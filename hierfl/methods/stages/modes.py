"""Modes of a density on R^K, and its curvature there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import scipy  # which loads scipy.optimize when it is used
import torch
from torch import Tensor

from hierfl.core.chains import Density, Mode

CLIMB = 100  # steps to a mode
# of many points that climb at once: pairs that they remember; the share of an expected rise that is one;
# nats below the highest within which points are to reach their modes, and the slope there
PAIRS, ENOUGH, HIGH, LEVEL = 30, 1e-4, 3.0, 0.1
STEP, FLATTEST = 1e-4, 0.02  # of differences of slopes; least curvature of a direction
LOWEST = 1e30  # log density of a point where it is not finite

Slopes = Callable[[Tensor], Tensor]  # of the log density, (S, K) at x (S, K)


def climbed(density: Density, start: Tensor, farthest: Tensor | None = None) -> Tensor:
    """Return the mode of a density near a point (K,), at most `farthest` (K,) from it.

    Where one row can sit at infinite density, as of a client with a scale of its own, the mode is
    there: no draw is.
    """

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = density(torch.from_numpy(x)[None])
        lost = -value[0].nan_to_num(nan=-LOWEST, posinf=-LOWEST, neginf=-LOWEST)
        return float(lost), -slope[0].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).numpy()

    # torch.optim imports torch's compiler, two seconds of a fit
    climb = scipy.optimize.minimize(
        loss,
        start.numpy(),
        jac=True,
        method="L-BFGS-B",
        bounds=None if farthest is None else torch.stack([start - farthest, start + farthest], 1),
        options={"maxiter": CLIMB, "maxcor": CLIMB},
    )
    there = torch.from_numpy(climb.x)
    after, before = (density(x[None])[0] for x in (there, start))
    rises = bool(after >= before)
    return there if rises and bool(there.isfinite().all()) else start


def climbed_at_once(
    density: Density, at: Tensor, steps: int, longest: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Return where so many evaluations at most lead from points (S, K), and the densities there, (S,).

    L-BFGS (Nocedal and Wright 2006, algorithm 7.5) of each point, whose scalars move by at most
    `longest`; a move that does not rise is halved. It ends where the highest points are at their modes.
    """
    value, slope = _finite(*density(at))
    pairs = deque[tuple[Tensor, Tensor, Tensor]](maxlen=PAIRS)
    scale = (1.0 / slope.norm(dim=1)).nan_to_num(0.0, 0.0, 0.0)
    ahead, length = _moved(slope, scale, pairs, longest), torch.ones(len(at))
    for _ in range(steps):
        move = length[:, None] * ahead
        new, slope_there = _finite(*density(at + move))
        rises = new >= value + ENOUGH * (move * slope).sum(1)
        change = slope - slope_there
        curved = (move * change).sum(1)
        is_pair = rises & (curved > 0.0)
        pairs.append((move, change, torch.where(is_pair, 1.0 / curved, 0.0)))
        scale = torch.where(is_pair, curved / change.square().sum(1), scale)
        at = torch.where(rises[:, None], at + move, at)
        slope = torch.where(rises[:, None], slope_there, slope)
        value = torch.where(rises, new, value)
        length = torch.where(rises, 1.0, 0.5 * length)
        ahead = torch.where(rises[:, None], _moved(slope, scale, pairs, longest), ahead)
        is_high = value > value.max() - HIGH
        if bool((slope[is_high].norm(dim=1) < LEVEL).all()):
            break
    return at, value


def _finite(value: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    finite = value.nan_to_num(nan=-LOWEST, posinf=-LOWEST, neginf=-LOWEST)
    return finite, slope.nan_to_num(0.0, 0.0, 0.0)


def _moved(
    slope: Tensor, scale: Tensor, pairs: Iterable[tuple[Tensor, Tensor, Tensor]], longest: float
) -> Tensor:
    """Return the next moves (S, K) by pairs of moves, changes of slopes, and weights (S,), 0 of no pair."""
    ahead, along = slope, list[Tensor]()
    for move, change, weight in reversed([*pairs]):
        along.append(weight * (move * ahead).sum(1))
        ahead = ahead - along[-1][:, None] * change
    ahead = scale[:, None] * ahead
    for (move, change, weight), b in zip(pairs, reversed(along), strict=True):
        ahead = ahead + (b - weight * (change * ahead).sum(1))[:, None] * move
    return ahead * (longest / ahead.abs().amax(1, keepdim=True)).clamp(max=1.0)


class Bends(NamedTuple):
    """Minus second derivatives of a log density in D leading numbers and N E others.

    The others are independent between N groups, given the leading ones; K = D + N E.
    """

    leading: Tensor  # (D, D)
    between: Tensor  # (N, E, D)
    own: Tensor  # (N, E, E)

    def matrix(self) -> Tensor:
        """Return the derivatives in all numbers, (K, K)."""
        size, between = len(self.leading), self.between.flatten(0, 1)
        whole = torch.block_diag(self.leading, *self.own)
        whole[size:, :size], whole[:size, size:] = between, between.mT
        return whole

    def of_all(self) -> Bends:
        """Return the same with all numbers as leading ones."""
        whole = self.matrix()
        return Bends(whole, torch.zeros(0, 0, len(whole)), torch.zeros(0, 0, 0))

    def diagonal(self) -> Tensor:
        """Return the second derivatives, (K,)."""
        return torch.cat([self.leading.diagonal(), self.own.diagonal(dim1=1, dim2=2).flatten()])


def bends(slopes: Slopes, at: Tensor, shared: int, own: int) -> Bends:
    """Return how slopes fall about a point: of `shared` numbers, and of `own` ones of each client if any follow.

    Differences are over parts of a number's sd given the others: 1e-5 of a slope of years not centered.
    """
    step = torch.full_like(at, STEP)
    curvature = _bends_over(step, slopes, at, shared, own).diagonal().abs()
    return _bends_over(step * curvature.clamp(min=1.0).rsqrt(), slopes, at, shared, own)


def _bends_over(step: Tensor, slopes: Slopes, at: Tensor, shared: int, own: int) -> Bends:
    """Return how slopes fall, by differences over steps (K,)."""
    size, own = len(at), own if len(at) > shared else 0
    clients = (size - shared) // max(1, own)
    moves = torch.zeros(shared + own, size)
    moves[:shared, :shared] = torch.eye(shared)
    moves[shared:, shared:] = torch.eye(own).repeat(1, clients)
    moves = step * moves
    ahead, behind = slopes(torch.cat([at + moves, at - moves])).split(len(moves))
    fall = (0.5 * (behind - ahead)).nan_to_num()
    outer, between = (fall[:shared] / step[:shared, None]).tensor_split([shared], 1)
    between = between.view(shared, clients, own).movedim(0, 2)
    inside = fall[shared:, shared:].view(own, clients, own).movedim(0, 2)
    return Bends(outer, between, inside / step[shared:].view(clients, 1, own))


def normal_about(at: Tensor, falls: Bends) -> Mode:
    """Return the Normal distribution by the curvature at a mode (K,)."""
    outer, between, inside = falls
    own_tril = _covariance_tril(inside)
    reach = own_tril.mT @ between
    tril = _covariance_tril(outer - (reach.mT @ reach).sum(0))
    return Mode(at, tril, -own_tril @ reach, own_tril)


def _covariance_tril(precision: Tensor) -> Tensor:
    """Return Cholesky factors of inverses of (..., K, K), whose eigenvalues are kept off 0."""
    values, vectors = torch.linalg.eigh(0.5 * (precision + precision.mT))
    covariance = (vectors / values.abs().clamp(min=FLATTEST)[..., None, :]) @ vectors.mT
    return torch.linalg.cholesky_ex(covariance).L
