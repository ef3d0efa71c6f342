"""Clients' log ratios at other draws than those at which they sent them, by a polynomial of z.

A log ratio says how much a client's likelihood differs from its factor: it is small and smooth, so
that a quadratic or a cubic of the global parameters holds what there is of it. What the polynomial
misses is measured on the draws that are known, and grows with the distance of the new draws from
them. Where new draws lie beyond all known ones, its terms of the highest degree count as error.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.summaries.weights import LEAST_SHARE, PASSES, quadratic_in, tempered

TIMES = 3  # draws for each coefficient, at least
# Nats of error with which draws are good: no mean is off by more posterior sds (Cauchy-Schwarz). On
# heart disease means were off by 0.06 with 0.06, by 0.10, and a width by 14 %, with 0.12.
GOOD = 0.1
OUTSIDE = 0.05  # share of the new draws that may lie farther out than all known ones


class Carried(NamedTuple):
    """Log ratios of n clients at S other draws."""

    each: Tensor  # (S, n)
    error: float  # sd of the error of their sum, in nats; infinite where it is not known


def carried_over(each: Tensor, z: Tensor, log_base: Tensor, to: Tensor) -> Carried:
    """Return log ratios (A, n) at draws z (A, K) as they are at draws `to` (S, K).

    `log_base` (A,) + the sum of the ratios are the log weights that make z draws of the target.
    """
    mean = each.mean(0).expand(len(to), -1)
    if float((each - each.mean(0)).abs().max()) == 0.0:
        return Carried(mean, 0.0)
    x, new = ((of - z.mean(0)) / (z.std(0) + 1e-300) for of in (z, to))
    far = _is_beyond(x, new)
    best, lower = Carried(mean, math.inf), mean
    for degree in (1, 2, 3):
        known = _terms(x, degree)
        if TIMES * known.shape[1] > len(x):
            continue
        found = _fitted(each, known, log_base, _terms(new, degree))
        if far:  # a lower degree that fits the known draws tells nothing of the others
            off = float((found.each - lower).sum(1).std())
            best = found._replace(error=math.hypot(found.error, off))
        elif found.error < best.error:
            best = found
        lower = found.each
    return best


def _fitted(each: Tensor, known: Tensor, log_base: Tensor, new: Tensor) -> Carried:
    """Return log ratios at new draws by a fit of terms (A, P) where the target is, and its error."""
    total = each.sum(1)
    share = tempered(total + log_base, LEAST_SHARE)
    for _ in range(PASSES):
        root = share.sqrt()[:, None]
        found = torch.linalg.lstsq(root * known, root * each).solution
        share = tempered((known @ found).sum(1) + log_base, LEAST_SHARE)
    left = total - (known @ found).sum(1)
    degrees = max(1e-3, 1.0 - known.shape[1] * float(share.square().sum()))
    variance = float((share * left.square()).sum()) / degrees
    # the sandwich: how well the coefficients are known, at the new draws
    back = torch.linalg.pinv(known.mT @ (share[:, None] * known), hermitian=True)
    spread = new @ (back @ (known.mT @ (share.square()[:, None] * known)) @ back)
    return Carried(new @ found, math.sqrt(variance * (1.0 + float((spread * new).sum(1).mean()))))


def _is_beyond(x: Tensor, new: Tensor) -> bool:
    """Return whether more than a few of the new draws lie farther out than all known ones."""
    tril = torch.linalg.cholesky_ex(torch.cov(x.mT).reshape(x.shape[1], -1)).L
    reach, far = (
        torch.linalg.solve_triangular(tril, of.mT, upper=False).square().sum(0) for of in (x, new)
    )
    return not float((far > reach.max()).double().mean()) <= OUTSIDE


def _terms(x: Tensor, degree: int) -> Tensor:
    """Return the terms of a polynomial of x (A, K) of a degree; of many x without products."""
    if degree == 1:
        return torch.cat([torch.ones(len(x), 1), x], 1)
    size = x.shape[1]
    if TIMES * (size + 1) * (size + 2) // 2 > len(x):
        return torch.cat([torch.ones(len(x), 1), *(x**power for power in range(1, degree + 1))], 1)
    if degree == 2:
        return quadratic_in(x)
    if TIMES * math.comb(size + 3, 3) > len(x):
        return torch.cat([quadratic_in(x), x**3], 1)
    i, j, k = torch.combinations(torch.arange(size), 3, with_replacement=True).unbind(1)
    return torch.cat([quadratic_in(x), x[:, i] * x[:, j] * x[:, k]], 1)
