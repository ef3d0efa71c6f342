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
from torch import Tensor
from torch.quasirandom import SobolEngine

# a k-hat above it: no practical number of draws is enough (Vehtari et al. 2024, section 3.2.4)
K_HAT = 0.7
DOUBT = 0.5  # from which on the variance of the weights is infinite, and tails are to be checked
# Weights with such a share effective and none so many nats above the mean need no tail. k-hat, of
# the largest alone, was 0.7 to 1.1 of two corners with four times the mean.
FLAT_SHARE, FLAT = 0.5, math.log(10.0)
ROWS = 256  # whose tails are fitted at once: 15 MB
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
        total, ndtr, ndtri_ = self.left + self.right, torch.special.ndtr, torch.special.ndtri
        low, high = ndtr(normal), ndtr(-normal)
        down = self.left * ndtri_((low * total / (2.0 * self.left)).clamp(max=0.5))
        up = -self.right * ndtri_((high * total / (2.0 * self.right)).clamp(max=0.5))
        return self.loc + (torch.where(low * total < self.left, down, up) * stretch) @ self.tril.mT

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
        gap = self.right - self.left
        # The standard deviation of a two-piece normal.
        deviation = ((1.0 - 2.0 / math.pi) * gap.square() + self.right * self.left).sqrt()
        tril = torch.linalg.cholesky(covariance)
        right, low = self.right / deviation, self.left / deviation
        return Split(loc - tril @ ((right - low) * math.sqrt(2.0 / math.pi)), tril, right, low)


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
    log, k_hat, effective = smoothed_rows(log_ratios[None])
    return Weights(log[0], float(k_hat), float(effective))


def smoothed_rows(log_ratios: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return smoothed log weights (n, S), k-hats (n,) and effective numbers (n,) of rows of log ratios."""
    if len(log_ratios) > ROWS:
        blocks = [smoothed_rows(part) for part in log_ratios.split(ROWS)]
        log, k_hat, effective = (torch.cat(tensors) for tensors in zip(*blocks, strict=True))
        return log, k_hat, effective
    x = log_ratios.double() - log_ratios.amax(1, keepdim=True).double()
    count = x.shape[1]
    tail = math.ceil(min(0.2 * count, 3.0 * math.sqrt(count)))
    top, at = x.topk(tail + 1, dim=1)  # descending
    cut = top[:, -1:].clamp(min=math.log(torch.finfo(x.dtype).tiny)).exp()
    largest, at = top[:, :-1].flip(1), at[:, :-1].flip(1)
    excess = largest.exp() - cut
    k_hat, scale = pareto_fit(excess)
    there = (excess[:, -1:] > excess[:, :1]) & (tail >= 5) & k_hat.isfinite()
    survival = torch.log1p(-(torch.arange(tail, dtype=x.dtype) + 0.5) / tail)
    bent = torch.where(k_hat.abs() > 1e-12, torch.expm1(-k_hat * survival) / k_hat, -survival)
    new = (scale * bent + cut).log().clamp(max=0.0)
    x = x.scatter(1, at, torch.where(there, new, largest)).log_softmax(1)
    k_hat = torch.where(there, k_hat, torch.inf)[:, 0]
    return x.to(log_ratios.dtype), k_hat, 1.0 / (2.0 * x).exp().sum(1)


def pareto_fit(excess: Tensor) -> tuple[Tensor, Tensor]:
    """Return shapes k-hat and scales, (n, 1), of generalized Paretos, fitted to ascending excesses (n, T)."""
    count = excess.shape[1]
    grid = 30 + int(math.sqrt(count))
    b = 1.0 - (grid / (torch.arange(1, grid + 1, dtype=excess.dtype) - 0.5)).sqrt()
    quarter = excess[:, int(count / 4.0 + 0.5) - 1, None]
    b = b / (3.0 * quarter) + 1.0 / excess[:, -1:]  # (n, G)
    shape = torch.log1p(-b[:, :, None] * excess[:, None]).mean(2)
    profile = count * ((-b / shape).log() - shape - 1.0)
    weights = profile.softmax(1)
    weights = torch.where(weights >= 10.0 * torch.finfo(b.dtype).eps, weights, 0.0)
    best = ((b * weights).sum(1) / weights.sum(1))[:, None]
    k = torch.log1p(-best * excess).mean(1, keepdim=True)
    return (count * k + 5.0) / (count + 10.0), -k / best


def rests_on_few(log_weights: Tensor, k_hat: float) -> bool:
    """Return whether the tails rest on few draws, by normalized log weights (S,) and their k-hat."""
    count = len(log_weights)
    effective = 1.0 / float((2.0 * log_weights).exp().sum())
    is_flat = effective > FLAT_SHARE * count and float(log_weights.max()) + math.log(count) < FLAT
    return not k_hat < DOUBT and not is_flat


def resampled(points: Tensor, log_weights: Tensor, count: int) -> Tensor:
    """Return `count` of the points (S, K), each repeated in proportion to its weight."""
    return points[chosen(log_weights, count)]


def chosen(log_weights: Tensor, count: int) -> Tensor:
    """Return the ascending indices (count,) of systematic resampling by log weights (S,)."""
    sums = torch.cumsum(log_weights.double().exp(), 0)
    at = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.searchsorted(sums / sums[-1], at).clamp(max=len(sums) - 1)
