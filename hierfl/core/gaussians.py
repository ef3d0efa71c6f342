"""Normal distributions and exponentials of quadratic forms, in batches, in closed form."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LOG_2_PI = math.log(2.0 * math.pi)
SMALL = 2  # rows of a matrix up to which LAPACK takes several times as long as entries by hand


class Normal(NamedTuple):
    """Normal distributions."""

    mean: Tensor  # (C, D)
    precision: Tensor  # (C, D, D)
    log_det: Tensor  # (C,), of the precision
    is_diagonal: bool = False  # whether the precision is

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log densities at x (D,), (C,)."""
        away = x - self.mean
        square = (away * (self.precision @ away[..., None])[..., 0]).sum(-1)
        return 0.5 * (self.log_det - square - len(x) * LOG_2_PI)

    def unchained(self, slopes: Tensor) -> "Normal":
        """Return the joint distribution if means (C, D) move with x (D,) by slopes (C, D, D)."""
        unit_lower = torch.eye(slopes.shape[-1], dtype=slopes.dtype) - slopes
        mean = torch.linalg.inv_ex(unit_lower).inverse @ self.mean[..., None]
        return Normal(mean[..., 0], unit_lower.mT @ self.precision @ unit_lower, self.log_det)


def least_squares_solution(matrix: Tensor, of: Tensor) -> Tensor:
    """Return the shortest x (K, M) with the least |matrix x - of|, for matrix (N, K) and of (N, M); or NaN.

    torch's default driver pivots by memory that nobody has set, so that last digits differ from run
    to run; chains make different draws of them.
    """
    if not of.numel() or not bool(matrix.isfinite().all() and of.isfinite().all()):
        return of.new_full((matrix.shape[1], of.shape[1]), torch.nan)
    return torch.linalg.lstsq(matrix, of, driver="gelsd").solution  # noqa: TID251


def slopes_along(means: Callable[[Tensor], Tensor], at_zero: Tensor) -> Tensor:
    """Return how far means (C, D), which are linear in x (D,), move with it, (C, D, D)."""
    axes = torch.eye(at_zero.shape[-1], dtype=at_zero.dtype)
    return (torch.vmap(means)(axes) - at_zero).permute(1, 2, 0)


class Quadratic(NamedTuple):
    """exp(constant + shift . d - d' precision d / 2), a function of x = center + d (D,)."""

    precision: Tensor  # (..., D, D)
    shift: Tensor  # (..., D)
    constant: Tensor  # (...)
    center: Tensor | float = 0.0  # (..., D)

    def log_integral(self) -> Tensor:
        """Return the log integral over x (...), NaN if it diverges."""
        if self.precision.shape[-1] <= SMALL:
            return self.normal()[0]
        tril, log_det = _tril_of(self.precision)
        shift = self.shift[..., None]
        turned = torch.linalg.solve_triangular(tril, shift, upper=False)[..., 0]
        return self._integral(turned, log_det)

    def normal(self, wider: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log integral, and of x the mean and the upper root of the covariance, `wider`."""
        root, log_det = inverse_root(self.precision)
        turned = times(root.mT, self.shift)
        return self._integral(turned, log_det), self.center + times(root, turned), wider * root

    def _integral(self, turned: Tensor, log_det: Tensor) -> Tensor:
        size = self.precision.shape[-1]
        return self.constant + 0.5 * (dot(turned, turned) - log_det + size * LOG_2_PI)

    def log(self, x: Tensor) -> Tensor:
        """Return the log of the function at x (..., D), (...)."""
        away = x - self.center
        return self.constant + dot(self.shift - 0.5 * times(self.precision, away), away)

    def along(self, start: Tensor, slopes: Tensor) -> "Quadratic":
        """Return the batch's product at x = start + slopes m, as a function of m (M,), (C or 1, D, M)."""
        turned = (self.precision @ start[..., None])[..., 0]
        constant = self.constant + ((self.shift - 0.5 * turned) * start).sum(-1)
        precision, pull = self.precision, self.shift - turned
        if len(slopes) == 1:  # the same for the whole batch
            precision, pull = precision.sum(0, keepdim=True), pull.sum(0, keepdim=True)
        flat, turned = slopes.flatten(0, 1), (precision @ slopes).flatten(0, 1)
        return Quadratic(flat.mT @ turned, pull.flatten() @ flat, constant.sum(0))


def product(matrix: Tensor, other: Tensor) -> Tensor:
    """Return the product of batches of matrices; where they share one dimension, entry by entry."""
    return matrix * other if matrix.shape[-1] == 1 else matrix @ other


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return the products of batches of matrices (..., A, B) and vectors (..., B)."""
    return product(matrix, vector[..., None])[..., 0]


def times_one(matrices: Tensor, vector: Tensor) -> Tensor:
    """Return the products of C matrices (C, A, B) and one vector (B,): many vectors do not repeat them."""
    return (matrices.flatten(0, 1) @ vector).view(matrices.shape[:2])


def dot(vector: Tensor, other: Tensor) -> Tensor:
    """Return the inner products of batches of vectors (..., D)."""
    products = vector * other
    return products[..., 0] if products.shape[-1] == 1 else products.sum(-1)


def times_factor(
    normal: Normal, u: Tensor, precision: Tensor, shift: Tensor, power: Tensor | float = 1.0
) -> Quadratic:
    """Return Normal distributions of w (D,) times powers of factors of v = (w, u (U,) or (C, U)), of w.

    About the Normal's mean: no large numbers cancel where it is narrow.
    """
    size, mean = normal.mean.shape[-1], normal.mean
    by_u = precision[:, :, size:]
    turned = times_one(by_u, u) if u.dim() == 1 else times(by_u, u)
    own, pull = times(precision[:, :size, :size], mean), shift[:, :size] - turned[:, :size]
    at_mean = ((shift[:, size:] - 0.5 * turned[:, size:]) * u).sum(-1)
    at_mean = at_mean + ((pull - 0.5 * own) * mean).sum(-1)
    return Quadratic(
        normal.precision + power * precision[:, :size, :size],
        power * (pull - own),
        0.5 * (normal.log_det - size * LOG_2_PI) + power * at_mean,
        mean,
    )


def without_own(
    prior: Normal,
    precision: Tensor,
    shift: Tensor,
    power: Tensor | float = 1.0,
    *,
    summed: bool,
) -> Quadratic:
    """Integrate Normal(w; mu, A^-1) times powers of factors of (w, u) over w, by client or `summed`.

    In w = R^-T e with A = R R': no large numbers cancel where the prior is narrow or nearly singular.
    """
    size = prior.precision.shape[-1]
    root, back = roots(prior)
    own = power * product(back, product(back, precision[:, :size, :size]).mT)
    cross = power * product(back, precision[:, :size, size:])
    low, pull = precision[:, size:, size:], power * product(back, shift[:, :size, None])[..., 0]
    eye = torch.eye(size, dtype=prior.precision.dtype)
    covariance, log_det = inverse(own + eye)
    # the same, but that one loses digits of correlated sites, and the other takes longer
    retained = eye - covariance if prior.is_diagonal else product(covariance, own)
    to_u, mean = product(covariance, cross), times(covariance, pull)
    rest = power * shift[:, size:]
    if summed:  # what follows is linear in sums over clients
        flat = to_u.flatten(0, 1).mT
        lower = power * low.sum(0, keepdim=True) - flat @ cross.flatten(0, 1)
        shift_u = rest.sum(0, keepdim=True) - flat @ pull.flatten()
        constant = 0.5 * (mean.flatten() @ pull.flatten() - log_det.sum())
        retained, to_u = retained.sum(0, keepdim=True), to_u.sum(0, keepdim=True)
        mean = mean.sum(0, keepdim=True)
    else:
        lower = power * low - product(cross.mT, to_u)
        shift_u = rest - times(to_u.mT, pull)
        constant = 0.5 * (dot(mean, pull) - log_det)
    corner, shift_w = product(root, to_u), product(root, mean[..., None])[..., 0]
    top = product(root, product(root, retained).mT)
    rows = [torch.cat([top, corner], -1), torch.cat([corner.mT, lower], -1)]
    return Quadratic(torch.cat(rows, -2), torch.cat([shift_w, shift_u], -1), constant)


def roots(normal: Normal) -> tuple[Tensor, Tensor]:
    """Return R and R^-1 (..., D, D) with R R' the precision, R lower; diagonals (..., D, 1) if it is one."""
    matrix = normal.precision
    if normal.is_diagonal or matrix.shape[-1] == 1:
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)[..., None]
        return diagonal.sqrt(), diagonal.rsqrt()
    if matrix.shape[-1] == 2:  # LAPACK takes several times as long
        first = matrix[..., :1, :1].sqrt()
        below = matrix[..., 1:, :1] / first
        last = (matrix[..., 1:, 1:] - below.square()).sqrt()
        none, across = torch.zeros_like(first), -below / (first * last)
        lower = [torch.cat([first, none], -1), torch.cat([below, last], -1)]
        back = [torch.cat([1.0 / first, none], -1), torch.cat([across, 1.0 / last], -1)]
        return torch.cat(lower, -2), torch.cat(back, -2)
    root, info = torch.linalg.cholesky_ex(matrix)
    root = torch.where((info == 0)[..., None, None], root, torch.nan)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    return root, torch.linalg.solve_triangular(root, eye, upper=False)


def upper_root(covariance: Tensor) -> Tensor:
    """Return U (..., D, D) with U U' the covariance, U upper.

    A shift of a column adds multiples of its slope to the intercept before it, and to U's first row
    the same: points U e move with the column.
    """
    return torch.linalg.cholesky_ex(covariance.flip((-2, -1))).L.flip((-2, -1))


def turned_root(tril: Tensor) -> Tensor:
    """Return the upper root of the covariance L L' by L (..., D, D), without loss of digits."""
    lower = torch.linalg.qr(tril.double().flip(-2).mT).R.mT
    positive = lower * lower.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    return positive.flip((-2, -1)).to(tril.dtype)


def inverse_root(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return U (..., D, D), upper, with U U' the inverse, and the log determinant, NaN if not positive definite."""
    if not matrix.shape[-1]:
        return matrix, matrix.sum((-2, -1))
    if matrix.shape[-1] > SMALL:
        tril, log_det = _tril_of(matrix)
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
        return torch.linalg.solve_triangular(tril, eye, upper=False).mT, log_det
    first = matrix[..., :1, :1]
    good = first > 0.0
    first = torch.where(good, first, 1.0)
    log_det = torch.where(good, first.log(), torch.nan)[..., 0, 0]
    corner = first.rsqrt()
    if matrix.shape[-1] == 1:
        return corner, log_det
    slope = matrix[..., 1:, :1] / first
    low, log_rest = inverse_root(matrix[..., 1:, 1:] - first * slope * slope.mT)
    across = -product(slope.mT, low)
    below = torch.cat([torch.zeros_like(slope), low], -1)
    return torch.cat([torch.cat([corner, across], -1), below], -2), log_det + log_rest


def inverse(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse (..., D, D) and the log determinant, NaN if not positive definite."""
    if matrix.shape[-1] <= SMALL:
        root, log_det = inverse_root(matrix)
        return product(root, root.mT), log_det
    tril, log_det = _tril_of(matrix)
    return torch.cholesky_inverse(tril), log_det


def _tril_of(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Cholesky factors (..., D, D), and the log determinant; 1 and NaN if not positive definite."""
    tril, info = torch.linalg.cholesky_ex(matrix)
    # what is not finite in a row is so on the diagonal
    good = (info == 0) & tril.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    tril = torch.where(good[..., None, None], tril, eye)
    log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return tril, torch.where(good, log_det, torch.nan)


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(-x)) for x > 0, exact for small and for large x."""
    is_small = x < math.log(2.0)
    ones = torch.ones_like(x)
    # each branch sees only numbers that it can compute, so that the other's gradient is not nan
    small = (-torch.expm1(-torch.where(is_small, x, ones))).log()
    large = torch.log1p(-torch.where(is_small, ones, x).neg().exp())
    return torch.where(is_small, small, large)


def log_normal_cdf(x: Tensor) -> Tensor:
    """Return log Phi(x), exact in both tails, as are its derivatives; torch.special.log_ndtr is slow under vmap."""
    far = x < -1.0
    low = torch.where(far, x, -torch.ones_like(x))
    high = torch.where(far, torch.zeros_like(x), x)
    below = (0.5 * torch.special.erfcx(-low / math.sqrt(2.0))).log() - 0.5 * low**2
    return torch.where(far, below, torch.log1p(-0.5 * torch.erfc(high / math.sqrt(2.0))))


def log_normal_between(low: Tensor, high: Tensor) -> Tensor:
    """Return log(Phi(high) - Phi(low)) for low < high, exact in both tails."""
    # in the upper tail by symmetry, so that the two are subtracted where they are small
    flip = low + high > 0.0
    above = log_normal_cdf(torch.where(flip, -low, high))
    below = log_normal_cdf(torch.where(flip, -high, low))
    return above + log1mexp(above - below)


GRID, LEAST = 2.0**-32, 2.0**-5  # of rounding, and the least unit relative to the largest
NOTHING = 1e-100  # the unit of a factor that is 0; its square has to be a number


class Factor(NamedTuple):
    """The Gaussian factors of C clients' likelihoods."""

    precision: Tensor  # (C, V, V) Lambda, without negative eigenvalues
    shift: Tensor  # (C, V) eta
    raised: Tensor  # (C,) how many eigenvalues of Lambda were negative, and are 0 instead


def rounded(factor: Factor, covariance: Tensor | None = None) -> Factor:
    """Return factors rounded to about 32 binary digits: engines differ by the last few of 53.

    A scalar of which rows say little has digits of noise: by the `covariance` (V, V) of a belief it
    is compared with the others in its own sds, as columns may have any unit, and be far from 0.
    """
    size = factor.precision.diagonal(dim1=-2, dim2=-1).abs().sqrt()
    if covariance is not None:
        sds = covariance.diagonal().sqrt()
        size = size.maximum(LEAST * (size * sds).amax(-1, keepdim=True) / sds)
    size = size.clamp(min=NOTHING)
    powers = size.log2().floor().exp2()
    whole = (
        (factor.shift / powers).abs().amax(-1, keepdim=True).clamp(min=1.0).log2().floor().exp2()
    )
    return Factor(
        _on_grid(factor.precision, powers[..., :, None] * powers[..., None, :] * GRID),
        _on_grid(factor.shift, whole * powers * GRID),
        factor.raised,
    )


def _on_grid(value: Tensor, unit: Tensor) -> Tensor:
    return (value / unit).round() * unit
