"""Pareto-smoothed importance sampling (PSIS) with quasi-random points, and proposals fitted to weighted ones.

The largest weights become quantiles of a generalized Pareto distribution of shape k-hat: from 0.7
on the proposal misses too much of the target.

Sources: Vehtari et al. 2024, JMLR 25(72), arXiv:1507.02646, with the prior on k-hat of appendix C;
the fit: Zhang and Stephens 2009, Technometrics 51(3); a proposal by its own weighted points: Cappe et
al. 2004, J. Comput. Graph. Stat. 13, whose form here is hierfl's.
"""

import math
from dataclasses import dataclass, replace
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
# of a proposal of scales
WIDTHS, SHARES = (1.0, 1.5, 2.5), (0.8, 0.14, 0.06)  # of the mixture of normal scores
LEVELS = (0.03, 0.06, 0.11, 0.18, 0.28, 0.39, 0.5, 0.61, 0.72, 0.82, 0.89, 0.94, 0.97)
PLENTY = 200.0  # effective points for which all levels are used; every second one for fewer
WIDER, WIDER_TAILS = 1.05, 1.3  # than what the points say
LEAST_SPAN = 1e-6  # distance of the outer quantiles


def _uniforms(count: int, size: int, seed: int) -> Tensor:
    engine = SobolEngine(size, scramble=True, seed=seed & 0x7FFFFFFFFFFFFFFF)
    # Kept off 0 and 1, where the normal quantile is infinite.
    return engine.draw(count, dtype=torch.float64).clamp(2.0**-40, 1.0 - 2.0**-40)


def normal_points(count: int, size: int, *, seed: int = 0) -> Tensor:
    """Return quasi-random normals (S, K): a scrambled Sobol sequence and its reflection about 0."""
    points = torch.special.ndtri(_uniforms(count // 2, size, seed))
    half = points.to(torch.get_default_dtype())
    return torch.cat([half, -half])


def frames(count: int, size: int, *, seed: int = 0) -> Tensor:
    """Return about `count` points (S, K), or 2 K, of mean 0 and covariance 1: axes of turned frames."""
    g = torch.Generator().manual_seed(seed)
    turned = torch.randn(max(1, count // (2 * size)), size, size, generator=g, dtype=torch.float64)
    half = math.sqrt(size) * torch.linalg.qr(turned).Q.flatten(0, 1)
    return torch.cat([half, -half]).to(torch.get_default_dtype())


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

    def refitted(self, loc: Tensor, covariance: Tensor) -> "Split":
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


@dataclass(frozen=True, eq=False)
class ScalesProposal:
    """A distribution of K scales y_i = g_i(x_i), x = L e, with e from a mixture of Normals.

    Marginals are by quantiles with exponential tails, the copula is Gaussian.
    g_i is a monotone cubic, then a parabola; wide components see what narrow points would miss.
    """

    scores: Tensor  # (Q,) normal scores of the quantiles
    knots: Tensor  # (Q, K) the quantiles
    slopes: Tensor  # (Q, K) of g there
    tril: Tensor  # (K, K) L

    def times(self, wider: float) -> "ScalesProposal":
        """Return the proposal with normal scores that are wider."""
        return replace(self, tril=wider * self.tril)

    def at(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """Return points y (S, K) and log densities by standard normals e (S, K + 1)."""
        e, u = e[:, :-1], torch.special.ndtr(e[:, -1])
        count = e.shape[1]
        wide = 1.0 + (torch.tensor(WIDTHS) - 1.0) / max(1.0, count / 3.0) ** 0.5
        share = torch.tensor(SHARES)
        e = e * wide[(u[:, None] > share.cumsum(0)[:-1]).sum(1)][:, None]
        square = e.square().sum(1, keepdim=True)
        log_parts = share.log() - count * wide.log() - 0.5 * square / wide.square()
        value, slope = self._marginals(e @ self.tril.mT)
        stretch = self.tril.diagonal().log().sum() + slope.clamp(min=1e-300).log().sum(1)
        return value, log_parts.logsumexp(1) - stretch - 0.5 * count * math.log(2.0 * math.pi)

    def _marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return g (S, K) and its derivative at normal scores x (S, K)."""
        i = torch.bucketize(x, self.scores).clamp(1, len(self.scores) - 1)
        low, width = self.scores[i - 1], self.scores[i] - self.scores[i - 1]
        y0, y1 = self.knots.gather(0, i - 1), self.knots.gather(0, i)
        d0, d1 = self.slopes.gather(0, i - 1), self.slopes.gather(0, i)
        t = ((x - low) / width).clamp(0.0, 1.0)
        rise = y1 - y0
        value = y0 + t * t * (3.0 - 2.0 * t) * rise
        value = value + width * t * (1.0 - t) * ((1.0 - t) * d0 - t * d1)
        slope = 6.0 * t * (1.0 - t) * rise / width
        slope = slope + (1.0 - t) * (1.0 - 3.0 * t) * d0 + t * (3.0 * t - 2.0) * d1
        for end, sign in ((0, -1.0), (-1, 1.0)):
            far = sign * (x - self.scores[end])
            steep, bend = self.slopes[end], 1.0 / self.scores[end].abs()
            tail = self.knots[end] + sign * steep * (far + 0.5 * bend * far.square())
            value = torch.where(far > 0.0, tail, value)
            slope = torch.where(far > 0.0, steep * (1.0 + bend * far), slope)
        return value, slope


def fitted(points: Tensor, weights: Tensor) -> ScalesProposal:
    """Return the proposal of weighted points (S, K); the weights (S,) sum to 1."""
    points = points.to(weights)  # priors made outside of the program are of single precision
    count, size = points.shape
    ordered, order = points.sort(0)
    share = weights[order]
    sums = share.cumsum(0) - 0.5 * share
    effective = 1.0 / float(weights.square().sum())
    levels = torch.tensor(LEVELS if effective > PLENTY else LEVELS[::2])
    i = torch.searchsorted(sums.mT.contiguous(), levels.expand(size, -1).contiguous()).mT
    i = i.clamp(1, count - 1)
    below, above = sums.gather(0, i - 1), sums.gather(0, i)
    t = ((levels[:, None] - below) / (above - below).clamp(min=1e-300)).clamp(0.0, 1.0)
    knots = ordered.gather(0, i - 1).lerp(ordered.gather(0, i), t)
    scores = torch.special.ndtri(levels)
    span = (knots[-1] - knots[0]).clamp(min=LEAST_SPAN)
    gaps = (knots[1:] - knots[:-1]).clamp(min=1e-3 * span / len(levels))
    knots = torch.cat([knots[:1], knots[:1] + gaps.cumsum(0)])
    rate = gaps / (scores[1:] - scores[:-1])[:, None]
    # harmonic means keep the cubic monotone
    between = 2.0 * rate[1:] * rate[:-1] / (rate[1:] + rate[:-1])
    slopes = torch.cat([rate[:1], between, rate[-1:]])
    # tails as long as the mean excess says, and a little longer
    for end, sign in ((0, -1.0), (-1, 1.0)):
        excess = (sign * (points - knots[end])).clamp(min=0.0)
        beyond = (weights @ (excess > 0.0).to(weights)).clamp(min=1e-12)
        steep = WIDER_TAILS * scores[end].abs() * (weights @ excess) / beyond
        slopes[end] = slopes[end].maximum(steep)
    return ScalesProposal(scores, knots, slopes, WIDER * _copula(sums, order, weights, effective))


def _copula(sums: Tensor, order: Tensor, weights: Tensor, effective: float) -> Tensor:
    """Return the Cholesky factor of the correlations of the points' normal scores, (K, K)."""
    ranked = torch.special.ndtri(sums.clamp(1e-6, 1.0 - 1e-6))
    x = torch.empty_like(ranked).scatter_(0, order, ranked)
    size, x = x.shape[1], x - weights @ x
    covariance = x.mT @ (x * weights[:, None])
    scale = covariance.diagonal().clamp(min=1e-12).sqrt()
    shrunk = size**2 / (size**2 + 4.0 * effective)  # toward independence where there are few points
    eye = torch.eye(size, dtype=x.dtype)
    correlation = (1.0 - shrunk) * covariance / (scale[:, None] * scale) + shrunk * eye
    tril, info = torch.linalg.cholesky_ex(correlation)
    return eye if bool(info) else tril
