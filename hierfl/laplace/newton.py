"""Second-order steps of a server, pure functions: to the mode, then to the best Gaussian q."""

from __future__ import annotations

import torch
from torch import Tensor

from hierfl.core.trees import Tree
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


def climbing(start: Tensor, radius: float) -> Tree:
    """Return the state before the first evaluation, at `start` (K,); `radius` is in prior units."""
    size = len(start)
    return {
        "loc": start.clone(),
        "precision": torch.eye(size, dtype=start.dtype),
        "radius": torch.tensor(radius, dtype=start.dtype),
        "value": torch.tensor(-torch.inf, dtype=start.dtype),
        "best": start.clone(),
        "gradient": torch.zeros(size, dtype=start.dtype),
        "curvature": torch.eye(size, dtype=start.dtype),
        "raised": torch.zeros((), dtype=start.dtype),
        "moved": torch.tensor(torch.inf, dtype=start.dtype),
    }


def climbed(state: Tree, expansion: Expansion, unit: Tensor) -> Tree:
    """Take a trust-region Newton step from the best point; `moved` is in sds, below 1 at the mode."""
    first = bool(state["value"].isneginf())
    better = bool(expansion.value > state["value"] - 1e-9)
    if better:
        radius = state["radius"] * (1.0 if first else 2.0)
        best = {"value": expansion.value, "best": state["loc"]}
        best |= {"gradient": expansion.gradient, "curvature": -expansion.hessian}
    else:
        radius = state["radius"] / 4.0
        best = {k: state[k] for k in ("value", "best", "gradient", "curvature")}
    precision, raised = positive(best["curvature"], unit, fold=True)
    move = torch.linalg.solve(precision, best["gradient"])
    moved = length(move, precision)
    shorter = (radius / (move * unit).norm().clamp(min=1e-300)).clamp(max=1.0)
    if better and bool(moved < 1.0):
        shorter = torch.ones_like(shorter)
    return {
        **state,
        **best,
        "loc": best["best"] + shorter * move,
        "precision": precision,
        "radius": radius,
        "raised": raised,
        "moved": moved,
    }


def settling(state: Tree) -> Tree:
    """Return the state before the first natural-gradient step, from the last state of the climb."""
    return {
        **state,
        "averaged": torch.zeros_like(state["radius"]),
        "moved": torch.full_like(state["radius"], torch.inf),
    }


def settled(state: Tree, expansion: Expansion, unit: Tensor) -> Tree:
    """Take a natural-gradient step of q = Normal(m, P^-1); `found` is averaged over points of q.

        P <- (1 - r) P + r (-E_q[Hessian]),    m <- m + r P^-1 E_q[gradient]

    The rate r is 1 / (1 + a), where `averaged` a counts steps longer than half the step before.
    Reference: Khan and Rue 2023, arXiv:2107.04562, Eq. (4) and section 3.
    """
    curvature, raised = positive(-expansion.hessian, unit, fold=False)
    full = length(torch.linalg.solve(curvature, expansion.gradient), curvature)
    last = state["moved"] * (1.0 + state["averaged"])
    averaged = state["averaged"] + (full > 0.5 * last).to(full.dtype)
    rate = 1.0 / (1.0 + averaged)
    precision = (1.0 - rate) * state["precision"] + rate * curvature
    move = torch.linalg.solve(precision, expansion.gradient)
    moved = length(move, precision)
    move = move * rate * (LONGEST / moved.clamp(min=1e-300)).clamp(max=1.0)
    return {
        **state,
        "loc": state["loc"] + move,
        "precision": precision,
        "averaged": averaged,
        "raised": raised,
        "moved": rate * moved,
    }


def tril_of(precision: Tensor) -> Tensor:
    """Return the lower Cholesky factor of P^-1, (K, K)."""
    return torch.linalg.cholesky(torch.linalg.inv(precision))
