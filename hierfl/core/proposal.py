"""A proposal for a few scales: marginals by quantiles with exponential tails, a Gaussian copula.

A fit to its own weighted points: Cappe et al. 2004, J. Comput. Graph. Stat. 13; forms are hierfl's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WIDTHS, SHARES = (1.0, 1.5, 2.5), (0.8, 0.14, 0.06)  # of the mixture of normal scores
LEVELS = (0.03, 0.06, 0.11, 0.18, 0.28, 0.39, 0.5, 0.61, 0.72, 0.82, 0.89, 0.94, 0.97)
PLENTY = 200.0  # effective points for which all levels are used; every second one for fewer
WIDER, WIDER_TAILS = 1.05, 1.3  # than what the points say
NARROWEST = 1e-6  # distance of the outer quantiles


@dataclass(frozen=True, eq=False)
class ScalesProposal:
    """A distribution of K scales y_i = g_i(x_i), x = L e, with e from a mixture of Normals.

    g_i is a monotone cubic, then a parabola; wide components see what narrow points would miss.
    """

    scores: Tensor  # (Q,) normal scores of the quantiles
    knots: Tensor  # (Q, K) the quantiles
    slopes: Tensor  # (Q, K) of g there
    tril: Tensor  # (K, K) L

    def times(self, wider: float) -> ScalesProposal:
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
    span = (knots[-1] - knots[0]).clamp(min=NARROWEST)
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
