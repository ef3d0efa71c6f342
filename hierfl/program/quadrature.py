"""Integrals of log densities of a few numbers, one for each row: Gauss-Hermite and Laplace.

    log int exp f(u) du = log |L| + log sum_q w_q exp(f(m + L z_q) + |z_q|^2 / 2)

m is the mode of f, and L L' = (-f'')^-1 there. Where f is quadratic, as where all is Normal, the
integral is log |L| + f(m) + D log(2 pi) / 2, without nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from itertools import product as pairs
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import debug_unwrap, grad, vjp, vmap

from hierfl.core.gaussians import LOG_2_PI, dot, inverse_root, product, times
from hierfl.core.importance_sampling import normal_points

Log = Callable[[Tensor], Tensor]  # (*shape, D) -> (*shape)
FEW = 2  # numbers with derivatives by differences, or by a loop, which is faster than vmap
STEPS, STILL = 10, 0.03  # of Newton's method to the mode at most; a last step, in the row's own sds
NEAR = 0.1  # the center of a prior, about which its sd is found; a Normal's is exact
FARTHEST = 4.0  # a step, in sds of the prior
CANDIDATES = 64  # of a draw from a density that is near a Normal
POINTS = 1024  # with which Laplace's approximation is compared
# sds and number of the points at which a density is compared with a quadratic form; digits that agree
WIDE, TRIALS, ROUNDING = 2.0, 8, 1e-10
CORNERS = (0, 0), (0, 1), (1, 1)
FLATTEST = 1e-8  # the curvature of a direction, relative to the prior's, where a density is flat


class Normals(NamedTuple):
    """A Normal of each row: its mean (*shape, D), and a root (*shape, D, D) of its covariance."""

    loc: Tensor
    root: Tensor

    @property
    def log_volume(self) -> Tensor:
        """Log |L|, (*shape)."""
        return self.root.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def at(self, z: Tensor) -> Tensor:
        """Return m + L z, for z (D,) or (*shape, D)."""
        columns = (self.root[..., i] * z[..., i, None] for i in range(z.shape[-1]))
        return sum(columns, self.loc)


def derivatives(log: Log, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slope (*shape, D) and the curvature (*shape, D, D) of the log density of each row."""

    def slope(u: Tensor) -> Tensor:
        slopes: Tensor = grad(lambda v: log(v).sum())(u)
        return slopes

    at, back = vjp(slope, u)[:2]
    unit = torch.eye(u.shape[-1], dtype=u.dtype)
    if len(unit) <= FEW:
        return at, torch.stack([back(along.expand(u.shape))[0] for along in unit], -2)
    return at, vmap(lambda along: back(along.expand(u.shape))[0], out_dims=-2)(unit)


class _Expansion(NamedTuple):
    """A row's log density to second order about a point, in sds of the prior."""

    at: Tensor  # (*shape, D)
    value: Tensor  # (*shape, 1)
    slope: Tensor  # (*shape, D)
    root: Tensor  # (*shape, D D), of the inverse of what is minus the curvature

    @property
    def step(self) -> Tensor:
        """Newton's step to the mode, (*shape, D)."""
        root = self.matrix
        return times(root, times(root.mT, self.slope)).nan_to_num()

    @property
    def matrix(self) -> Tensor:
        """The root, (*shape, D, D)."""
        return self.root.unflatten(-1, (self.at.shape[-1], -1))


def _expanded(log: Log, at: Tensor, unit: Tensor, width: Tensor | float) -> _Expansion:
    """Return the expansion at a point, by differences over a part of the `width` where these are few."""
    if at.shape[-1] <= FEW:
        step = torch.finfo(at.dtype).eps ** 0.25 * unit * width
        value, slope, curvature = _differences(log, at, step)
    else:
        value, (slope, curvature) = log(at), derivatives(log, at)
    root, _ = inverse_root(_positive(-curvature * unit[..., None] * unit[..., None, :]))
    value = value.nan_to_num(nan=-torch.inf)[..., None]
    return _Expansion(at, value, slope * unit, root.flatten(-2))


def _differences(log: Log, u: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, slopes and curvatures, as `derivatives` does, in fewer operations."""
    size = u.shape[-1]
    eye = torch.eye(size, dtype=u.dtype)
    along = torch.cat([0.0 * eye[:1], eye, -eye, eye.sum(0, keepdim=True)])
    values = vmap(lambda z: log(u + step * z))(along[: 3 * size])  # one number has no corner
    here, ahead, behind = values[0], values[1 : 1 + size], values[1 + size : 1 + 2 * size]
    slope = (ahead - behind).movedim(0, -1) / (2.0 * step)
    curvature = torch.diag_embed((ahead - here + behind - here).movedim(0, -1))
    if size == 2:
        crossed = values[-1] - ahead[0] - ahead[1] + here
        curvature = curvature + crossed[..., None, None] * (1.0 - eye)
    return here, slope, curvature / (step[..., None] * step[..., None, :])


def fitted(log: Log, prior: Log, start: Tensor) -> Normals:
    """Return each row's Normal at the mode of its log density, by Newton's method from the prior's center.

    A step that loses is not taken, and the next one is at most a quarter as long.
    """
    curvature = _differences(prior, start, torch.full_like(start, NEAR))[2]
    unit = curvature.diagonal(dim1=-2, dim2=-1).neg().clamp(min=1e-30).rsqrt()
    here, longest = _expanded(log, start, unit, 1.0), torch.full_like(start[..., :1], FARTHEST)
    for _ in range(STEPS):
        step = here.step
        if _all_below((here.slope * step).sum(-1), STILL**2):
            break
        length = step.abs().amax(-1, keepdim=True)
        step = step * (longest / length).clamp(max=1.0)
        there = _expanded(log, here.at + unit * step, unit, here.matrix.norm(dim=-1).clamp(max=1.0))
        gains = there.value >= here.value
        longest = torch.where(gains, longest, length.minimum(longest) / 4.0)
        here = _Expansion(*(torch.where(gains, *of) for of in zip(there, here, strict=True)))
    return Normals(here.at.detach(), (unit[..., None] * here.matrix).detach())


def _all_below(values: Tensor, bound: float) -> bool:
    """Return whether values are below a bound, at all points under `vmap`; False where they are traced."""
    with suppress(RuntimeError):
        return bool((debug_unwrap(values) < bound).all())
    return False


def _positive(matrix: Tensor) -> Tensor:
    """Return symmetric matrices with the absolute values of their eigenvalues, none near 0."""
    matrix = matrix.nan_to_num()
    if matrix.shape[-1] == 1:
        return matrix.abs().clamp(min=FLATTEST)
    if matrix.shape[-1] == 2:  # (A A)^(1/2) in closed form: LAPACK takes matrices one by one
        square, (a, b, c) = product(matrix, matrix), (matrix[..., i, j] for i, j in CORNERS)
        det = (a * c - b * b).abs()
        eye = torch.eye(2, dtype=matrix.dtype)
        trace = (a * a + c * c + 2.0 * (b * b + det)).clamp(min=FLATTEST**2)
        root = (square + det[..., None, None] * eye) / trace.sqrt()[..., None, None]
        return root + FLATTEST * eye
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    return (vectors * values.abs().clamp(min=FLATTEST)[..., None, :]) @ vectors.mT


def of_quadratic(log: Log, start: Tensor) -> Tensor:
    """Return the integral of each row where f is quadratic: one Newton step is at its mode."""
    slope, curvature = derivatives(log, start)
    root, log_det = inverse_root(-curvature)
    u = start + times(root, times(root.mT, slope))
    return log(u) + 0.5 * (u.shape[-1] * LOG_2_PI - log_det)


def is_quadratic(log: Log, start: Tensor, place: Normals) -> Tensor:
    """Return which rows' log densities are quadratic, (*shape), by points about their modes."""
    here, (slope, curvature) = log(start), derivatives(log, start)

    def differs(z: Tensor) -> Tensor:
        u = place.at(z)
        there, away = log(u), u - start
        expanded = here + dot(slope + 0.5 * times(curvature, away), away)
        return (there - expanded).abs() - ROUNDING * (1.0 + here.abs() + there.abs())

    z = WIDE * normal_points(TRIALS, start.shape[-1]).to(start)
    return (torch.stack([differs(point) for point in z]) <= 0.0).all(0)


def nodes_of(order: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes (Q, D) and the logs of what they count, log w + |z|^2 / 2, (Q,)."""
    points, weights = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(order))
    z = torch.tensor(list(pairs(points.tolist(), repeat=size)), dtype=like.dtype)
    logs = torch.tensor(list(pairs(weights.log().tolist(), repeat=size)), dtype=like.dtype)
    return z, logs.sum(-1) + 0.5 * z.square().sum(-1)


def integral(log: Log, place: Normals, order: int) -> Tensor:
    """Return log int exp f(u) du of each row; order 0 is Laplace's approximation."""
    if order == 0:
        return _laplace(log, place)
    z, counts = nodes_of(order, place.loc.shape[-1], place.loc)
    values = vmap(lambda node: log(place.at(node)))(z)
    counts = counts.reshape(-1, *[1] * (values.dim() - 1))
    return torch.logsumexp(values + counts, 0) + place.log_volume


def by_points(log: Log, place: Normals) -> Tensor:
    """Return the integral by importance sampling from the Normals, at quasi-random points."""
    z = normal_points(POINTS, place.loc.shape[-1]).to(place.loc)
    logs = vmap(lambda point: log(place.at(point)))(z)
    counts = 0.5 * (z.square().sum(-1) + z.shape[-1] * LOG_2_PI)
    counts = counts.reshape(-1, *[1] * (logs.dim() - 1)) - math.log(len(z))
    return torch.logsumexp(logs + counts, 0) + place.log_volume


def _laplace(log: Log, place: Normals) -> Tensor:
    """Return Laplace's approximation; two steps of Newton's method give the mode its derivatives."""
    u = place.loc
    for _ in range(2):
        slope, curvature = derivatives(log, u)
        u = u - torch.linalg.solve(curvature, slope[..., None])[..., 0]
    curvature = derivatives(log, u)[1]
    half = torch.linalg.cholesky_ex(-curvature).L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return log(u) - half + 0.5 * u.shape[-1] * LOG_2_PI


def drawn(log: Log, place: Normals, z: Tensor, chances: Tensor) -> Tensor:
    """Return a draw (*shape, D) of each row by the weights of candidates m + L z, z (n, *shape, D)."""
    free = vmap(place.at)(z)
    weights = (vmap(log)(free) + 0.5 * z.square().sum(-1)).softmax(0)
    index = (weights.cumsum(0)[:-1] <= chances).sum(0)
    index = index[None, ..., None].expand(1, *free.shape[1:])
    return free.gather(0, index)[0]
