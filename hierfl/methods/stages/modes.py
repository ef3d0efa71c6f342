"""Modes of a density on R^K, and its curvature there."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy  # which loads scipy.optimize when it is used
import torch
from torch import Tensor

from hierfl.core.chains import Density, Mode

CLIMB = 100  # steps to a mode
PAIRS, ENOUGH = (
    10,
    1e-4,
)  # by which many points climb at once; the share of an expected rise that is one
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
    """Return where so many evaluations lead from points (S, K), and the densities there, (S,).

    L-BFGS (Nocedal and Wright 2006, algorithm 7.5) of each point, whose scalars move by at most
    `longest`; a move that does not rise is halved.
    """
    value, slope = _finite(*density(at))
    pairs = at.new_zeros(PAIRS, 2, *at.shape)
    length, ahead = torch.ones(len(at)), _ahead(slope, pairs, longest)
    for _ in range(steps):
        move = length[:, None] * ahead
        new, slope_there = _finite(*density(at + move))
        rises = new >= value + ENOUGH * (move * slope).sum(1)
        last = torch.stack([move, slope - slope_there])
        pairs = torch.where(rises[:, None], torch.cat([pairs[1:], last[None]]), pairs)
        at = torch.where(rises[:, None], at + move, at)
        slope = torch.where(rises[:, None], slope_there, slope)
        value = torch.where(rises, new, value)
        length = torch.where(rises, 1.0, 0.5 * length)
        ahead = torch.where(rises[:, None], _ahead(slope, pairs, longest), ahead)
    return at, value


def _finite(value: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    return value.nan_to_num(nan=-LOWEST, posinf=-LOWEST, neginf=-LOWEST), slope.nan_to_num(
        0.0, 0.0, 0.0
    )


def _ahead(slope: Tensor, pairs: Tensor, longest: float) -> Tensor:
    """Return the next move (S, K) by pairs (PAIRS, 2, S, K) of moves and changes of slopes, 0 where there are none."""
    moves, changes = pairs.unbind(1)
    curved = (moves * changes).sum(2)
    weight = torch.where(curved > 0.0, 1.0 / curved, 0.0)  # (PAIRS, S)
    ahead, along = slope, list[Tensor]()
    for move, change, of in zip(moves.flip(0), changes.flip(0), weight.flip(0), strict=True):
        along.append(of * (move * ahead).sum(1))
        ahead = ahead - along[-1][:, None] * change
    scale = curved[-1] / changes[-1].square().sum(1)
    scale = torch.where(curved[-1] > 0.0, scale, 1.0 / slope.norm(dim=1))
    ahead = scale.nan_to_num(0.0, 0.0, 0.0)[:, None] * ahead
    for move, change, of, b in zip(moves, changes, weight, reversed(along), strict=True):
        ahead = ahead + (b - of * (change * ahead).sum(1))[:, None] * move
    return ahead * (longest / ahead.abs().amax(1, keepdim=True)).clamp(max=1.0)


def curvature(slopes: Slopes, at: Tensor, places: Tensor) -> Tensor:
    """Return minus second derivatives (K, P) of a log density at a point (K,), in P of its places."""
    moves = STEP * torch.eye(len(at))[places]
    ahead, behind = slopes(torch.cat([at + moves, at - moves])).split(len(places))
    return ((behind - ahead) / (2.0 * STEP)).mT


def normal_about(slopes: Slopes, at: Tensor, own: int = 0, clients: int = 0) -> Mode:
    """Return the Normal distribution by the curvature at a mode (K + N E,).

    N `clients` with E `own` scalars each depend on each other through the K leading numbers alone.
    """
    size, shared = len(at), len(at) - clients * own
    moves = torch.zeros(shared + own, size)
    moves[:shared, :shared] = STEP * torch.eye(shared)
    moves[shared:, shared:] = STEP * torch.eye(own).repeat(1, clients)
    ahead, behind = slopes(torch.cat([at + moves, at - moves])).split(len(moves))
    minus_hessian = ((behind - ahead) / (2.0 * STEP)).nan_to_num()
    outer, between = minus_hessian[:shared].tensor_split([shared], 1)
    between = between.view(shared, clients, own).movedim(0, 2)  # (N, E, K)
    inside = minus_hessian[shared:, shared:].view(own, clients, own).movedim(0, 2)  # (N, E, E)
    own_tril = _covariance_tril(inside)
    reach = own_tril.mT @ between
    tril = _covariance_tril(outer - (reach.mT @ reach).sum(0))
    return Mode(at, tril, -own_tril @ reach, own_tril)


def _covariance_tril(precision: Tensor) -> Tensor:
    """Return Cholesky factors of inverses of (..., K, K), whose eigenvalues are kept off 0."""
    values, vectors = torch.linalg.eigh(0.5 * (precision + precision.mT))
    covariance = (vectors / values.abs().clamp(min=FLATTEST)[..., None, :]) @ vectors.mT
    return torch.linalg.cholesky_ex(covariance).L
