"""Normal distributions and exponentials of quadratic forms, in batches, in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LOG_2_PI = math.log(2.0 * math.pi)


class Normal(NamedTuple):
    """Normal distributions."""

    mean: Tensor  # (C, D)
    precision: Tensor  # (C, D, D)
    log_det: Tensor  # (C,), of the precision

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log densities at x (D,), (C,)."""
        away = x - self.mean
        square = (away * (self.precision @ away[..., None])[..., 0]).sum(-1)
        return 0.5 * (self.log_det - square - len(x) * LOG_2_PI)

    def unchained(self, means: Callable[[Tensor], Tensor]) -> Normal:
        """Return the joint distribution if means (C, D) move linearly with x (D,)."""
        axes = torch.eye(self.mean.shape[-1], dtype=self.mean.dtype)
        slopes = (torch.vmap(means)(axes) - self.mean).permute(1, 2, 0)
        rest = torch.eye(slopes.shape[-1], dtype=slopes.dtype) - slopes
        mean = torch.linalg.inv_ex(rest).inverse @ self.mean[..., None]
        return Normal(mean[..., 0], rest.mT @ self.precision @ rest, self.log_det)


class Quadratic(NamedTuple):
    """exp(constant + shift . x - x' precision x / 2), a function of x (D,)."""

    precision: Tensor  # (..., D, D)
    shift: Tensor  # (..., D)
    constant: Tensor  # (...)

    def log_integral(self) -> tuple[Tensor, Tensor]:
        """Return the log integral over x (...), NaN if it diverges, and x's covariance."""
        size = self.precision.shape[-1]
        if not size:
            return self.constant, self.precision
        covariance, log_det = inverse(self.precision)
        square = (self.shift * (covariance @ self.shift[..., None])[..., 0]).sum(-1)
        return self.constant + 0.5 * (square - log_det + size * LOG_2_PI), covariance

    def log(self, x: Tensor) -> Tensor:
        """Return the log of the function at x (..., D), (...)."""
        turned = (self.precision @ x[..., None])[..., 0]
        return self.constant + ((self.shift - 0.5 * turned) * x).sum(-1)

    def along(self, start: Tensor, slopes: Tensor) -> Quadratic:
        """Return the batch's product at x = start + slopes m, as a function of m (M,)."""
        turned = (self.precision @ start[..., None])[..., 0]
        constant = self.constant + ((self.shift - 0.5 * turned) * start).sum(-1)
        shift = ((self.shift - turned)[:, None] @ slopes)[:, 0]
        precision = slopes.mT @ (self.precision @ slopes)
        return Quadratic(precision.sum(0), shift.sum(0), constant.sum(0))


def times_factor(normal: Normal, u: Tensor, precision: Tensor, shift: Tensor) -> Quadratic:
    """Return Normal distributions of w (D,) times factors of v = (w, u (U,) or (C, U)), of w."""
    size = normal.mean.shape[-1]
    pull = (normal.precision @ normal.mean[..., None])[..., 0]
    constant = 0.5 * (normal.log_det - (normal.mean * pull).sum(-1) - size * LOG_2_PI)
    turned = (precision[:, :, size:] @ u[..., None])[..., 0]
    of_u = ((shift[:, size:] - 0.5 * turned[:, size:]) * u).sum(-1)
    return Quadratic(
        normal.precision + precision[:, :size, :size],
        pull + shift[:, :size] - turned[:, :size],
        constant + of_u,
    )


def without_own(
    prior: Tensor, log_det: Tensor, precision: Tensor, shift: Tensor, *, summed: bool
) -> Quadratic:
    """Integrate Normal(w; mu, A^-1) times factors of v = (w, u) over w: functions of (mu, u).

    `prior` is A, (C, D, D) or (1, D, D). If `summed`, return the product of all clients' integrals;
    A is then the same for all.
    """
    size = prior.shape[-1]
    own, cross = precision[:, :size, :size], precision[:, :size, size:]
    low = precision[:, size:, size:]
    covariance, whole = inverse(prior + own)
    pull, to_u = shift[:, :size, None], covariance @ cross
    mean = covariance @ pull
    parts: tuple[Tensor, ...] = (
        covariance,
        to_u,
        mean,
        low - cross.mT @ to_u,
        shift[:, size:] - (to_u.mT @ pull)[..., 0],
        0.5 * (log_det - whole + (mean * pull).sum((-2, -1))),
    )
    count = 1
    if summed:  # what follows is linear in the parts
        count, parts = len(shift), tuple(part.sum(0, keepdim=True) for part in parts)
    covariance, to_u, mean, lower, shift_u, constant = parts
    corner, shift_w = prior @ to_u, (prior @ mean)[..., 0]
    top = count * prior - prior @ covariance @ prior
    rows = [torch.cat([top, corner], -1), torch.cat([corner.mT, lower], -1)]
    return Quadratic(torch.cat(rows, -2), torch.cat([shift_w, shift_u], -1), constant)


def inverse(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse (..., D, D) and the log determinant, NaN if not positive definite."""
    if matrix.shape[-1] in (1, 2):  # LAPACK takes several times as long
        first = matrix[..., :1, :1]
        good = (first > 0.0) & first.isfinite()
        first = torch.where(good, first, 1.0)
        log_det = torch.where(good, first.log(), torch.nan)[..., 0, 0]
        if matrix.shape[-1] == 1:
            return 1.0 / first, log_det
        slope = matrix[..., 1:, :1] / first
        low, log_rest = inverse(matrix[..., 1:, 1:] - first * slope.square())
        cross = -slope * low
        top = torch.cat([1.0 / first - slope * cross, cross], -1)
        return torch.cat([top, torch.cat([cross, low], -1)], -2), log_det + log_rest
    tril, info = torch.linalg.cholesky_ex(matrix)
    good = (info == 0) & matrix.isfinite().all((-2, -1))
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    tril = torch.where(good[..., None, None], tril, eye)
    log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.cholesky_inverse(tril), torch.where(good, log_det, torch.nan)
