"""Points around a Gaussian, and the weights that make them draws of a density known up to a constant: PSIS.

Pareto-smoothed importance sampling: the largest weights are replaced by the quantiles of a generalised Pareto distribution fitted
to them; its shape k-hat says whether any such answer can be trusted (below 0.7), or the proposal missed too much of the density.

Sources: Vehtari, Simpson, Gelman, Yao and Gabry 2024, JMLR 25(72), arXiv:1507.02646; the fit: Zhang and Stephens 2009,
Technometrics 51(3), with the weak prior on k-hat of the former's appendix C.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammaincinv, ndtri
from torch import Tensor
from torch.quasirandom import SobolEngine

Array = NDArray[np.float64]
NARROWEST, WIDEST = (
    0.7,
    3.0,
)  # a side of a proposal, in standard deviations of q: too narrow is worse than too wide


def _uniforms(count: int, size: int, seed: int) -> Array:
    engine = SobolEngine(size, scramble=True, seed=seed)
    return engine.draw(count, dtype=torch.float64).clamp(2.0**-40, 1.0 - 2.0**-40).numpy()


def normal_points(count: int, size: int, *, seed: int = 0) -> Tensor:
    """Quasi-random standard normals (count, size), `count` even: Sobol's points, and the same reflected."""
    half = torch.as_tensor(
        ndtri(_uniforms(count // 2, size, seed)), dtype=torch.get_default_dtype()
    )
    return torch.cat([half, -half])


def heavy_points(count: int, size: int, *, freedom: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Quasi-random standard normals (count, size), reflected, and what makes their rows Student t's when multiplied by it, (count, 1)."""
    uniforms = _uniforms(count // 2, size + 1, seed)
    stretch = 1.0 / np.sqrt(gammaincinv(freedom / 2.0, uniforms[:, -1:]) * 2.0 / freedom)
    normal, heavy = (
        torch.as_tensor(v, dtype=torch.get_default_dtype())
        for v in (ndtri(uniforms[:, :-1]), stretch)
    )
    return torch.cat([normal, -normal]), torch.cat([heavy, heavy])


class Split(NamedTuple):
    """A Student t about `loc` (K,) with scale tril tril' (K, K), wider on one side than on the other along each column of tril.

    Along column i its scale is right_i (K,) on the positive side and left_i on the negative one; the density is continuous.

    Source: Geweke 1989, Econometrica 57(6), section 4, with the density made continuous (as in the two-piece normal).
    """

    loc: Tensor
    tril: Tensor
    right: Tensor
    left: Tensor

    def points(self, normal: Tensor, stretch: Tensor) -> Tensor:
        """The points (S, K) that standard normals (S, K) and the stretches of their rows (S, 1) become."""
        both, ndtr, ndtri_ = self.left + self.right, torch.special.ndtr, torch.special.ndtri
        low, high = ndtr(normal), ndtr(-normal)
        down = self.left * ndtri_((low * both / (2.0 * self.left)).clamp(max=0.5))
        up = -self.right * ndtri_((high * both / (2.0 * self.right)).clamp(max=0.5))
        return self.loc + (torch.where(low * both < self.left, down, up) * stretch) @ self.tril.mT

    def log_prob(self, points: Tensor, freedom: float) -> Tensor:
        """Log density (S,) at points (S, K), for `freedom` degrees."""
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
        """The same skews with this mean and this covariance (but for the factor that a t's covariance has)."""
        apart = self.right - self.left
        deviation = (
            (1.0 - 2.0 / math.pi) * apart.square() + self.right * self.left
        ).sqrt()  # of a two-piece normal
        tril = torch.linalg.cholesky(covariance)
        right, left = self.right / deviation, self.left / deviation
        return Split(loc - tril @ ((right - left) * math.sqrt(2.0 / math.pi)), tril, right, left)


def sides(fall: Tensor, far: float) -> Tensor:
    """Scales (...) of a Gaussian whose log density falls by `fall` (...) over `far`, between 0.7 and 3."""
    return (far / (2.0 * fall.clamp(min=1e-9)).sqrt()).nan_to_num(nan=1.0).clamp(NARROWEST, WIDEST)


class Weights(NamedTuple):
    """Normalised log weights (S,), k-hat, and the effective number of points 1 / sum w^2."""

    log: Tensor
    k_hat: float
    effective: float


def smoothed(log_ratios: Tensor) -> Weights:
    """Pareto-smoothed weights of points whose log (target / proposal) is given, (S,)."""
    x = log_ratios.double().numpy() - float(log_ratios.max())
    count = len(x)
    tail = math.ceil(min(0.2 * count, 3.0 * math.sqrt(count)))
    order = np.argsort(x, kind="stable")
    largest, cut = (
        order[-tail:],
        max(float(x[order[-tail - 1]]), math.log(np.finfo(np.float64).tiny)),
    )
    excess = np.exp(x[largest]) - math.exp(cut)
    k_hat = math.inf
    if tail >= 5 and excess[-1] > excess[0]:
        k_hat, scale = pareto_fit(excess)
        if math.isfinite(k_hat):
            at = (np.arange(tail) + 0.5) / tail
            quantiles = (
                scale * np.expm1(-k_hat * np.log1p(-at)) / k_hat
                if abs(k_hat) > 1e-12
                else -scale * np.log1p(-at)
            )
            x[largest] = np.minimum(np.log(quantiles + math.exp(cut)), 0.0)
    x = x - np.logaddexp.reduce(x)
    return Weights(
        torch.as_tensor(x, dtype=log_ratios.dtype), k_hat, float(1.0 / np.exp(2.0 * x).sum())
    )


def pareto_fit(excess: Array) -> tuple[float, float]:
    """Shape and scale of the generalised Pareto distribution of excesses over a threshold, ascending: Zhang and Stephens."""
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
    """`count` of the points (S, K), as often as their weights say: systematic resampling, which adds the least noise."""
    return points[chosen(log_weights, count)]


def chosen(log_weights: Tensor, count: int) -> Tensor:
    """Which of S points, whose log weights are given, stand for them all when there are `count`: (count,) int64, ascending."""
    sums = torch.cumsum(log_weights.double().exp(), 0)
    at = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.searchsorted(sums / sums[-1], at).clamp(max=len(sums) - 1)
