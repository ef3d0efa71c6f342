"""How much weighted draws know of each entry: effective and distinct draws, Monte Carlo errors.

With weights w that sum to 1, the mean of a function h of the draws has the variance sum w^2 (h -
E[h])^2, so that as many independent draws would do as

    Var[h] / sum w^2 (h - E[h])^2

Functions are normal scores of ranks (the bulk), their squares (the spread), and whether a draw is
below the 5% or the 95% point (the tails). Scores and not values, so that no moment has to exist:
the error of such a point is in sds of a Normal with that point and the same median.

Source: Vehtari et al. 2021, Bayesian Analysis 16(2), for chains; here for weights.
"""

from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.importance_sampling import chosen

TAILS = (0.05, 0.95)
# limits of a relative Monte Carlo error of an sd; of that of a 5% or 95% point, in sds
OFF_BY_CHANCE, END_OFF_BY_CHANCE = 0.1, 0.2


class DrawQuality(NamedTuple):
    """What weighted draws (S, K) know of K entries."""

    effective: Tensor  # (K,) the least effective number of draws, of bulk, spread and tails
    sd_error: Tensor  # (K,) Monte Carlo error of the sd, relative to it
    end_error: Tensor  # (K,) the larger one of the 5% and 95% points', in sds by their own side

    def excess(self, end_limit: float = END_OFF_BY_CHANCE) -> Tensor:
        """Return the larger error of each entry, (K,), in what it may be."""
        return (self.sd_error / OFF_BY_CHANCE).maximum(self.end_error / end_limit)


def quality_of(values: Tensor, log_weights: Tensor, share: float = 1.0) -> DrawQuality:
    """Judge draws (S, K) by log weights (S,), a `share` of them effective; an entry that never varies has no errors."""
    weights, values = log_weights.double().softmax(0), values.double()
    ordered, order = values.sort(0)
    weight = weights[order]
    sums = weight.cumsum(0)
    scores = torch.empty_like(values).scatter_(
        0, order, torch.special.ndtri((sums - 0.5 * weight).clamp(1e-9, 1.0 - 1e-9))
    )
    squares = (scores - weights @ scores).square()
    tails, ends = zip(*(_of_tail(p, ordered, weight, sums, share) for p in TAILS), strict=True)
    counts = torch.stack([_effective(h, weights) for h in (scores, squares)] + list(tails))
    away = values - weights @ values
    variance = weights @ away.square()
    shares = weights[:, None] * (away.square() / variance)
    sd_error = 0.5 * (shares - weights[:, None]).square().sum(0).sqrt() / share**0.5
    same = ordered[0] == ordered[-1]
    return DrawQuality(
        torch.where(same, torch.inf, share * counts.min(0).values),
        torch.where(same, 0.0, sd_error),
        torch.where(same, 0.0, torch.stack(ends).max(0).values),
    )


def distinct_of(values: Tensor, log_weights: Tensor) -> int:
    """Return the fewest values, in single precision, of an entry of draws (S, K) that varies, by their weights."""
    moves = (values != values[:1]).any(0)
    taken = values[chosen(log_weights, len(values))].float().sort(0).values
    steps = (taken[1:] != taken[:-1]).sum(0)[moves]
    return 1 + int(steps.min()) if len(steps) else len(values)


def _effective(h: Tensor, weights: Tensor) -> Tensor:
    """Return Var[h] / sum w^2 (h - E[h])^2 of functions h (S, K) of the draws, (K,)."""
    away = (h - weights @ h).square()
    return (weights @ away) / (weights.square() @ away)


def _of_tail(
    p: float, ordered: Tensor, weights: Tensor, sums: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """Return the effective number of draws at the p-quantile, and its Monte Carlo error in sds, (K,) each."""
    below = (sums <= p).to(weights)
    mean = (weights * below).sum(0)
    error = ((weights * (below - mean)).square().sum(0) / share).sqrt()
    levels = torch.stack([p - error, p + error, *(torch.full_like(error, q) for q in (p, 0.5))])
    at = torch.searchsorted(sums.mT.contiguous(), levels.clamp(0.0, 1.0).mT.contiguous()).mT
    low, high, end, middle = ordered.gather(0, at.clamp(max=len(ordered) - 1))
    sd = (end - middle) / NormalDist().inv_cdf(p)
    variance = (weights * (below - mean).square()).sum(0)
    effective = variance / (weights * (below - mean)).square().sum(0)
    return effective, (0.5 * (high - low) / sd).nan_to_num(nan=0.0)
