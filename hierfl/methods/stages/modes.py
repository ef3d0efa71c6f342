"""Modes of a density on R^K, and its curvature there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy  # which loads scipy.optimize when it is used
import torch
from torch import Tensor

from hierfl.core.chains import Density, Whitening

CLIMB = 100  # steps to a mode
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


def curvature(slopes: Slopes, at: Tensor, places: Tensor) -> Tensor:
    """Return minus second derivatives (K, P) of a log density at a point (K,), in P of its places."""
    moves = STEP * torch.eye(len(at))[places]
    ahead, behind = slopes(torch.cat([at + moves, at - moves])).split(len(places))
    return ((behind - ahead) / (2.0 * STEP)).mT


def normal_about(slopes: Slopes, mode: Tensor) -> Whitening:
    """Return the Normal distribution by the curvature at a mode (K,)."""
    minus_hessian = curvature(slopes, mode, torch.arange(len(mode)))
    symmetric = 0.5 * (minus_hessian + minus_hessian.mT).nan_to_num()
    values, vectors = torch.linalg.eigh(symmetric)
    covariance = (vectors / values.abs().clamp(min=FLATTEST)) @ vectors.mT
    return Whitening(mode, torch.linalg.cholesky_ex(covariance).L, torch.ones(0))
