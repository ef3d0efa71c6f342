"""Pareto-smoothed importance sampling (PSIS) with quasi-random Gaussian and Student t points.

The largest weights become quantiles of a generalized Pareto distribution of shape k-hat: from 0.7
on the proposal misses too much of the target.

Sources: Vehtari et al. 2024, JMLR 25(72), arXiv:1507.02646, with the prior on k-hat of appendix C;
the fit: Zhang and Stephens 2009, Technometrics 51(3).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.quasirandom import SobolEngine

# a k-hat above it: no practical number of draws is enough (Vehtari et al. 2024, section 3.2.4)
K_HAT = 0.7
Array = NDArray[np.float64]
# Bounds on the scale of one side of a proposal, in sds of q: narrow is worse than wide.
NARROWEST, WIDEST = 0.7, 3.0


def _uniforms(count: int, size: int, seed: int) -> Tensor:
    engine = SobolEngine(size, scramble=True, seed=seed & 0x7FFFFFFFFFFFFFFF)
    # Kept off 0 and 1, where the normal quantile is infinite.
    return engine.draw(count, dtype=torch.float64).clamp(2.0**-40, 1.0 - 2.0**-40)


def normal_points(count: int, size: int, *, seed: int = 0) -> Tensor:
    """Return quasi-random normals (S, K): a scrambled Sobol sequence and its reflection about 0."""
    points = torch.special.ndtri(_uniforms(count // 2, size, seed))
    half = points.to(torch.get_default_dtype())
    return torch.cat([half, -half])


def heavy_points(count: int, size: int, *, freedom: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return normals (S, K) and factors (S, 1), whose products are quasi-random Student t's."""
    from scipy.special import gammaincinv  # 0.1 s, and few fits need it

    uniforms = _uniforms(count // 2, size + 1, seed)
    gammas = gammaincinv(freedom / 2.0, uniforms[:, -1:].numpy())
    stretch = 1.0 / np.sqrt(gammas * 2.0 / freedom)
    dtype = torch.get_default_dtype()
    normal = torch.special.ndtri(uniforms[:, :-1]).to(dtype)
    return torch.cat([normal, -normal]), torch.as_tensor(stretch, dtype=dtype).repeat(2, 1)


class Split(NamedTuple):
    """A split Student t at `loc`: `left` and `right` scale the sides of axes, columns of `tril`.

    Source: Geweke 1989, Econometrica 57(6), section 4; continuous as in the two-piece normal.
    """

    loc: Tensor
    tril: Tensor
    right: Tensor
    left: Tensor

    def points(self, normal: Tensor, stretch: Tensor) -> Tensor:
        """Map standard normals (S, K) and Student factors (S, 1) to points (S, K)."""
        both, ndtr, ndtri_ = self.left + self.right, torch.special.ndtr, torch.special.ndtri
        low, high = ndtr(normal), ndtr(-normal)
        down = self.left * ndtri_((low * both / (2.0 * self.left)).clamp(max=0.5))
        up = -self.right * ndtri_((high * both / (2.0 * self.right)).clamp(max=0.5))
        return self.loc + (torch.where(low * both < self.left, down, up) * stretch) @ self.tril.mT

    def log_prob(self, points: Tensor, freedom: float) -> Tensor:
        """Return the log density (S,) at points (S, K), for `freedom` degrees of freedom."""
        size = self.loc.shape[0]
        away = torch.linalg.solve_triangular(self.tril, (points - self.loc).T, upper=False).T
        square = (away / torch.where(away > 0.0, self.right, self.left)).square().sum(-1)
        constant = (
            math.lgamma((freedom + size) / 2.0)
            - math.lgamma(freedom / 2.0)
            - 0.5 * size * math.log(freedom * math.pi)
        )
        volume = self.tril.diagonal().log().sum() + ((self.left + self.right) / 2.0).log().sum()
        return constant - volume - 0.5 * (freedom + size) * torch.log1p(square / freedom)

    def refitted(self, loc: Tensor, covariance: Tensor) -> Split:
        """Return the same skews with a given mean (K,) and covariance (K, K), matched as for a split normal."""
        apart = self.right - self.left
        # The standard deviation of a two-piece normal.
        deviation = ((1.0 - 2.0 / math.pi) * apart.square() + self.right * self.left).sqrt()
        tril = torch.linalg.cholesky(covariance)
        right, left = self.right / deviation, self.left / deviation
        return Split(loc - tril @ ((right - left) * math.sqrt(2.0 / math.pi)), tril, right, left)


def sides(fall: Tensor, far: float) -> Tensor:
    """Return far / sqrt(2 fall) in [0.7, 3], 1 for NaN: the scale at which a log density falls by `fall`."""
    return (far / (2.0 * fall.clamp(min=1e-9)).sqrt()).nan_to_num(nan=1.0).clamp(NARROWEST, WIDEST)


class Weights(NamedTuple):
    """Normalized log weights (S,), Pareto shape k-hat, and effective sample size 1 / sum w^2."""

    log: Tensor
    k_hat: float
    effective: float


def smoothed(log_ratios: Tensor) -> Weights:
    """Return the Pareto-smoothed importance weights of log ratios (S,), known up to a constant."""
    x = log_ratios.double().numpy() - float(log_ratios.max())
    count = len(x)
    tail = math.ceil(min(0.2 * count, 3.0 * math.sqrt(count)))
    order = np.argsort(x, kind="stable")
    largest = order[-tail:]
    cut = max(float(x[order[-tail - 1]]), math.log(np.finfo(np.float64).tiny))
    excess = np.exp(x[largest]) - math.exp(cut)
    k_hat = math.inf
    if tail >= 5 and excess[-1] > excess[0]:
        with np.errstate(all="ignore"):  # one weight may be all
            k_hat, scale = pareto_fit(excess)
        k_hat = math.inf if math.isnan(k_hat) else k_hat
        if math.isfinite(k_hat):
            survival = np.log1p(-(np.arange(tail) + 0.5) / tail)
            quantiles = -scale * survival
            if abs(k_hat) > 1e-12:
                quantiles = scale * np.expm1(-k_hat * survival) / k_hat
            x[largest] = np.minimum(np.log(quantiles + math.exp(cut)), 0.0)
    x = x - np.logaddexp.reduce(x)
    effective = float(1.0 / np.exp(2.0 * x).sum())
    return Weights(torch.as_tensor(x, dtype=log_ratios.dtype), k_hat, effective)


def pareto_fit(excess: Array) -> tuple[float, float]:
    """Return shape k-hat and scale of a generalized Pareto, fitted to ascending excesses (n,)."""
    count = len(excess)
    grid = 30 + int(math.sqrt(count))
    b = 1.0 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))
    b = b / (3.0 * excess[int(count / 4.0 + 0.5) - 1]) + 1.0 / excess[-1]
    shape = np.log1p(-b[:, None] * excess).mean(1)
    profile = count * (np.log(-b / shape) - shape - 1.0)
    weights = 1.0 / np.exp(profile - profile[:, None]).sum(1)
    kept = weights >= 10.0 * np.finfo(np.float64).eps
    best = float((b[kept] * weights[kept]).sum() / weights[kept].sum())
    k = float(np.log1p(-best * excess).mean())
    return (count * k + 5.0) / (count + 10.0), -k / best


def resampled(points: Tensor, log_weights: Tensor, count: int) -> Tensor:
    """Return `count` of the points (S, K), each repeated in proportion to its weight."""
    return points[chosen(log_weights, count)]


def chosen(log_weights: Tensor, count: int) -> Tensor:
    """Return the ascending indices (count,) of systematic resampling by log weights (S,)."""
    sums = torch.cumsum(log_weights.double().exp(), 0)
    at = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.searchsorted(sums / sums[-1], at).clamp(max=len(sums) - 1)
