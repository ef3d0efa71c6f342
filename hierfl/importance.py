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


def _uniforms(count: int, size: int, seed: int) -> Array:
    engine = SobolEngine(size, scramble=True, seed=seed)
    return engine.draw(count, dtype=torch.float64).clamp(2.0**-40, 1.0 - 2.0**-40).numpy()


def normal_points(count: int, size: int, *, seed: int = 0) -> Tensor:
    """Quasi-random standard normals (count, size), `count` even: Sobol's points, and the same reflected."""
    half = torch.as_tensor(ndtri(_uniforms(count // 2, size, seed)), dtype=torch.get_default_dtype())
    return torch.cat([half, -half])


def student_points(count: int, size: int, *, freedom: float, seed: int = 0) -> Tensor:
    """Quasi-random points of the standard multivariate t with `freedom` degrees, (count, size), reflected as the normals are."""
    uniforms = _uniforms(count // 2, size + 1, seed)
    shrink = np.sqrt(gammaincinv(freedom / 2.0, uniforms[:, -1:]) * 2.0 / freedom)
    half = torch.as_tensor(ndtri(uniforms[:, :-1]) / shrink, dtype=torch.get_default_dtype())
    return torch.cat([half, -half])


def student_log_prob(points: Tensor, loc: Tensor, tril: Tensor, freedom: float) -> Tensor:
    """Log density (S,) of points (S, K) under the multivariate t about loc (K,) with scale tril tril' (K, K)."""
    size = loc.shape[0]
    away = torch.linalg.solve_triangular(tril, (points - loc).T, upper=False).square().sum(0)
    constant = math.lgamma((freedom + size) / 2.0) - math.lgamma(freedom / 2.0) - 0.5 * size * math.log(freedom * math.pi)
    return constant - tril.diagonal().log().sum() - 0.5 * (freedom + size) * torch.log1p(away / freedom)


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
    largest, cut = order[-tail:], max(float(x[order[-tail - 1]]), math.log(np.finfo(np.float64).tiny))
    excess = np.exp(x[largest]) - math.exp(cut)
    k_hat = math.inf
    if tail >= 5 and excess[-1] > excess[0]:
        k_hat, scale = pareto_fit(excess)
        if math.isfinite(k_hat):
            at = (np.arange(tail) + 0.5) / tail
            quantiles = scale * np.expm1(-k_hat * np.log1p(-at)) / k_hat if abs(k_hat) > 1e-12 else -scale * np.log1p(-at)
            x[largest] = np.minimum(np.log(quantiles + math.exp(cut)), 0.0)
    x = x - np.logaddexp.reduce(x)
    return Weights(torch.as_tensor(x, dtype=log_ratios.dtype), k_hat, float(1.0 / np.exp(2.0 * x).sum()))


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
    sums = torch.cumsum(log_weights.double().exp(), 0)
    at = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return points[torch.searchsorted(sums / sums[-1], at).clamp(max=len(points) - 1)]
