"""Second-order steps of a server, pure functions: to the mode, then to the best Gaussian q."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hierfl.core.trees import tree_class
from hierfl.laplace.marginal import Expansion

LONGEST = 3.0  # the longest move of q's mean in a round, in standard deviations of q


def positive(curvature: Tensor, unit: Tensor, *, fold: bool) -> tuple[Tensor, Tensor]:
    """Return a precision from a curvature (K, K), raised to at least the prior's, and how much was raised."""
    scale = torch.outer(unit, unit)
    values, vectors = torch.linalg.eigh(curvature / scale)
    size = values.abs() if fold else values
    precision = (vectors * size.clamp(min=1.0)) @ vectors.T * scale
    return 0.5 * (precision + precision.T), (size < 1.0 - 1e-9).sum().to(curvature.dtype)


def length(move: Tensor, precision: Tensor) -> Tensor:
    """Return the length () of a move (K,) in sds of a Gaussian of precision (K, K)."""
    return (move @ precision @ move).clamp(min=0.0).sqrt()


@tree_class
class Ascent:
    """Where a server is on the way to the mode, or to q."""

    loc: Tensor  # (K,), where clients are asked next, or the mean of q
    precision: Tensor  # (K, K)
    radius: Tensor  # (), longest step of the climb, in prior units
    value: Tensor  # (), highest log density so far
    best: Tensor  # (K,), where that is
    gradient: Tensor  # (K,), there
    curvature: Tensor  # (K, K), there
    raised: Tensor  # (), eigenvalues of the curvature that were raised
    moved: Tensor  # (), length of the last step, in sds
    averaged: Tensor  # (), number of steps that were longer than half the step before

    @staticmethod
    def begin(start: Tensor, radius: float) -> Ascent:
        """Return the state before the first evaluation, at `start` (K,); `radius` is in prior units."""
        zero, eye = torch.zeros((), dtype=start.dtype), torch.eye(len(start), dtype=start.dtype)
        return Ascent(
            loc=start.clone(),
            precision=eye,
            radius=zero + radius,
            value=zero - torch.inf,
            best=start.clone(),
            gradient=torch.zeros_like(start),
            curvature=eye.clone(),
            raised=zero,
            moved=zero + torch.inf,
            averaged=zero.clone(),
        )

    @property
    def has_begun(self) -> bool:
        """Whether the density is known anywhere."""
        return not bool(self.value.isneginf())

    def climbed(self, expansion: Expansion, unit: Tensor) -> Ascent:
        """Take a trust-region Newton step from the best point; `moved` is in sds, below 1 at the mode."""
        better = bool(expansion.value > self.value - 1e-9)
        best = replace(self, radius=self.radius / 4.0)
        if better:
            best = replace(
                self,
                radius=self.radius * (2.0 if self.has_begun else 1.0),
                value=expansion.value,
                best=self.loc,
                gradient=expansion.gradient,
                curvature=-expansion.hessian,
            )
        precision, raised = positive(best.curvature, unit, fold=True)
        move = torch.linalg.solve(precision, best.gradient)
        moved = length(move, precision)
        shorter = (best.radius / (move * unit).norm().clamp(min=1e-300)).clamp(max=1.0)
        if better and bool(moved < 1.0):
            shorter = torch.ones_like(shorter)
        loc = best.best + shorter * move
        return replace(best, loc=loc, precision=precision, raised=raised, moved=moved)

    def settling(self) -> Ascent:
        """Return the state before the first natural-gradient step, from the last one of the climb."""
        moved = torch.full_like(self.radius, torch.inf)
        return replace(self, averaged=torch.zeros_like(self.radius), moved=moved)

    def settled(self, expansion: Expansion, unit: Tensor) -> Ascent:
        """Take a natural-gradient step of q = Normal(m, P^-1); `expansion` is averaged over points of q.

            P <- (1 - r) P + r (-E_q[Hessian]),    m <- m + r P^-1 E_q[gradient]

        The rate r is 1 / (1 + a), where `averaged` a counts steps longer than half the step before.
        Reference: Khan and Rue 2023, arXiv:2107.04562, Eq. (4) and section 3.
        """
        curvature, raised = positive(-expansion.hessian, unit, fold=False)
        full = length(torch.linalg.solve(curvature, expansion.gradient), curvature)
        last = self.moved * (1.0 + self.averaged)
        averaged = self.averaged + (full > 0.5 * last).to(full.dtype)
        rate = 1.0 / (1.0 + averaged)
        precision = (1.0 - rate) * self.precision + rate * curvature
        move = torch.linalg.solve(precision, expansion.gradient)
        moved = length(move, precision)
        move = move * rate * (LONGEST / moved.clamp(min=1e-300)).clamp(max=1.0)
        return replace(
            self,
            loc=self.loc + move,
            precision=precision,
            averaged=averaged,
            raised=raised,
            moved=rate * moved,
        )


def tril_of(precision: Tensor) -> Tensor:
    """Return the lower Cholesky factor of P^-1, (K, K)."""
    return torch.linalg.cholesky(torch.linalg.inv(precision))
