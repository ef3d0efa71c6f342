"""Clients' log ratios at other draws than those at which they sent them, by polynomials.

A log ratio says how much a client's likelihood differs from its factor: it is small and smooth, so
that a quadratic or a cubic of the global parameters holds what there is of it. It depends on them
through the Normal p(w | z) factor(v) of the client's local sites alone, and through u, which its
rows read. Where that is not enough, it is a cubic of this mean and covariance and of u: they hardly
move with scales that the rows leave open (heart disease: 0.03 nats of error in place of 0.3).

What a polynomial misses is measured on the draws that are known, and grows with the distance of the
new draws from them. Where new draws lie beyond all known ones, its terms of the highest degree count
as error.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.summaries.weights import LEAST_SHARE, PASSES, quadratic_in, tempered

TIMES = 3  # draws for each coefficient, at least
# Nats of error with which draws are good: no mean is off by more posterior sds (Cauchy-Schwarz). On
# heart disease means were off by 0.06 with 0.06, by 0.10, and a width by 14%, with 0.12.
GOOD = 0.1
SMALL = 0.1 * GOOD  # error of the clients whose own terms are not tried
MOST_OWN = 100  # clients whose own terms are tried: each is a fit of its own
SINGULAR = 1e-9  # added to variances of standardized terms, which may depend on each other
OUTSIDE = 0.05  # share of the new draws that may lie farther out than all known ones

Own = Callable[[int, Tensor], Tensor]  # what the i-th client's ratio depends on at z (S, K): (S, M)


class Carried(NamedTuple):
    """Log ratios of n clients at S other draws."""

    ratios: Tensor  # (S, n)
    error: float  # sd of the error of their sum, in nats; infinite where it is not known


class _Fit(NamedTuple):
    """Polynomials that are fitted to the log ratios of n clients at A known draws."""

    ratios: Tensor  # (S, n), at the new draws
    missed: Tensor  # (A, n), what they miss at the known ones
    share: Tensor  # (A,), weights that make the known draws those of the target
    times: Tensor  # (n,), by how much the error's variance is larger at the new draws
    far: Tensor  # (S, n), terms of the highest degree where new draws lie beyond the known ones

    def variances(self) -> Tensor:
        """Return the variance of each client's error, (n,)."""
        return self._at_new(self.share @ self.missed.square()) + self.far.var(0)

    def error(self) -> float:
        """Return the sd of the error of the sum of all clients."""
        variances = self.share @ self.missed.square()
        times = self._at_new(variances).sum() / variances.sum().clamp(min=1e-300)
        together = self.share @ self.missed.sum(1).square()
        variance = torch.where(together > 0.0, times * together, 0.0) + self.far.sum(1).var()
        return math.sqrt(float(variance))

    def _at_new(self, variances: Tensor) -> Tensor:
        # infinity times zero is zero
        return torch.where(variances > 0.0, self.times * variances, 0.0)

    def with_client(self, i: int, other: "_Fit") -> "_Fit":
        """Return the fit with another one of the i-th client."""
        here = torch.arange(self.ratios.shape[1]) == i

        def put(name: str) -> Tensor:
            return torch.where(here, getattr(other, name), getattr(self, name))

        return _Fit(put("ratios"), put("missed"), self.share, put("times"), put("far"))


def carried_over(
    ratios: Tensor, z: Tensor, log_base: Tensor, to: Tensor, own: Own | None = None
) -> Carried:
    """Return log ratios (A, n) at draws z (A, K) as they are at draws `to` (S, K).

    `log_base` (A,) + the sum of the ratios are the log weights that make z draws of the target.
    """
    if not bool((ratios - ratios.mean(0)).any()):
        return Carried(ratios.mean(0).expand(len(to), -1), 0.0)
    log_target = ratios.sum(1) + log_base
    fit = _fitted(ratios, z, to, log_target)
    if own is None:
        return Carried(fit.ratios, fit.error())
    variances = fit.variances()
    largest, order = variances.sort(descending=True)
    unexplained = largest.flip(0).cumsum(0).flip(0)  # of each client and those after it
    for i, variance in zip(order[:MOST_OWN].tolist(), unexplained.tolist(), strict=False):
        if variance <= SMALL**2:
            break
        own_fit = _fitted(ratios[:, i, None], own(i, z), own(i, to), log_target)
        if float(own_fit.variances()) < float(variances[i]):
            fit = fit.with_client(i, own_fit)
    return Carried(fit.ratios, fit.error())


def _fitted(ratios: Tensor, z: Tensor, to: Tensor, log_target: Tensor) -> _Fit:
    """Fit a polynomial of z (A, K) to log ratios (A, n), of the degree with the least error."""
    x, new = ((of - z.mean(0)) / (z.std(0) + 1e-300) for of in (z, to))
    lower, none = ratios.mean(0).expand(len(to), -1), torch.zeros(len(to), ratios.shape[1])
    share, unknown = tempered(log_target, LEAST_SHARE), torch.full(ratios.shape[1:], math.inf)
    best, beyond = _Fit(lower, ratios - lower[0], share, unknown, none), _is_beyond(x, new)
    for degree in (1, 2, 3):
        terms = _terms(x, degree)
        if TIMES * terms.shape[1] > len(x):
            continue
        fit = _of_degree(ratios, terms, log_target, _terms(new, degree))
        if beyond:  # a lower degree that fits the known draws tells nothing of the others
            best = fit._replace(far=fit.ratios - lower)
        elif fit.error() < best.error():
            best = fit
        lower = fit.ratios
    return best


def _of_degree(ratios: Tensor, terms: Tensor, log_target: Tensor, new: Tensor) -> _Fit:
    """Fit terms (A, P) to log ratios where the target is."""
    share = tempered(log_target, LEAST_SHARE)
    for _ in range(PASSES):
        root = share.sqrt()[:, None]
        # by its singular values: terms of draws that depend on each other have no other solution
        coefficients = torch.linalg.pinv(root * terms, rtol=1e-8) @ (root * ratios)
        residuals = ratios - terms @ coefficients
        share = tempered(log_target - residuals.sum(1), LEAST_SHARE)
    degrees = max(1e-3, 1.0 - terms.shape[1] * float(share.square().sum()))
    # the sandwich: how well the coefficients are known, at the new draws
    back = torch.linalg.pinv(terms.mT @ (share[:, None] * terms), hermitian=True)
    spread = new @ (back @ (terms.mT @ (share.square()[:, None] * terms)) @ back)
    times = (1.0 + float((spread * new).sum(1).mean())) / degrees
    none = torch.zeros(len(new), ratios.shape[1])
    return _Fit(new @ coefficients, residuals, share, torch.full(ratios.shape[1:], times), none)


def _is_beyond(x: Tensor, new: Tensor) -> bool:
    """Return whether more than a few of the new draws lie farther out than all known ones."""
    covariance = torch.cov(x.mT).reshape(x.shape[1], -1)
    tril = torch.linalg.cholesky_ex(covariance + SINGULAR * torch.eye(len(covariance))).L
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
