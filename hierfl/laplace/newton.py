"""Second-order steps of a server: to the mode of a log density under a trust region, then of a Gaussian q to its own fixed point.

States are dicts of tensors, so that a run may stop and go on; every function is pure.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hierfl.core.trees import Tree, tree_map
from hierfl.laplace.marginal import Expansion

LONGEST = 3.0  # standard deviations of q that its mean moves at most in a round


def positive(curvature: Tensor, unit: Tensor, *, fold: bool) -> tuple[Tensor, Tensor]:
    """A positive precision (K, K) of a curvature, and how many of its eigenvalues had to be raised, ().

    In units of the prior (`unit` (K,), one over its standard deviations) no eigenvalue is left below 1: data never make less of
    what is known. `fold` takes absolute values first, for a step in a region where the density is not concave.
    """
    scale = torch.outer(unit, unit)
    values, vectors = torch.linalg.eigh(curvature / scale)
    size = values.abs() if fold else values
    precision = (vectors * size.clamp(min=1.0)) @ vectors.T * scale
    return 0.5 * (precision + precision.T), (size < 1.0 - 1e-9).sum().to(curvature.dtype)


def length(move: Tensor, precision: Tensor) -> Tensor:
    """How long a move is, in standard deviations of a Gaussian with this precision."""
    return (move @ precision @ move).clamp(min=0.0).sqrt()


# ------------------------------------------------------------------------------------------------ to the mode
def climbing(start: Tensor, radius: float) -> Tree:
    """Before the first evaluation: the point to evaluate, and nothing known."""
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


def climbed(state: Tree, found: Expansion, unit: Tensor) -> Tree:
    """One trust-region Newton step, from what was found at `loc`; a point that is lower than the best so far is gone back on.

    `moved` is the length of the whole Newton step in standard deviations: below 1 the mode is as good as reached. The radius is
    in units of the prior, doubled after a step that was taken and quartered after one that was not.
    """
    first = bool(state["value"].isneginf())
    better = bool(found.value > state["value"] - 1e-9)
    if better:
        radius = state["radius"] * (1.0 if first else 2.0)
        best = {
            "value": found.value,
            "best": state["loc"],
            "gradient": found.gradient,
            "curvature": -found.hessian,
        }
    else:
        radius, best = (
            state["radius"] / 4.0,
            {k: state[k] for k in ("value", "best", "gradient", "curvature")},
        )
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


# ------------------------------------------------------------------------------------------------ to the posterior
def settling(state: Tree) -> Tree:
    """What the natural-gradient steps remember of one another."""
    return {
        **state,
        "averaged": torch.zeros_like(state["radius"]),
        "moved": torch.full_like(state["radius"], torch.inf),
    }


def settled(state: Tree, found: Expansion, unit: Tensor) -> Tree:
    """One natural-gradient step of q = Normal(m, P^-1), from gradient and Hessian of the log density averaged over q's points.

        P <- (1 - r) P + r (-E_q[Hessian]),    m <- m + r P^-1 E_q[gradient]

    At rate r = 1 as long as the moves shrink; from there on r = 1/2, 1/3, ...: the steps are averaged. `moved` is r times the
    length of the step.

    Reference: Khan and Rue 2023, arXiv:2107.04562, Eq. (4) and section 3.
    """
    curvature, raised = positive(-found.hessian, unit, fold=False)
    full = length(torch.linalg.solve(curvature, found.gradient), curvature)
    last = state["moved"] * (1.0 + state["averaged"])
    averaged = state["averaged"] + (full > 0.5 * last).to(full.dtype)
    rate = 1.0 / (1.0 + averaged)
    precision = (1.0 - rate) * state["precision"] + rate * curvature
    move = torch.linalg.solve(precision, found.gradient)
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
    """The lower Cholesky factor of P^-1."""
    return torch.linalg.cholesky(torch.linalg.inv(precision))


def detached(state: Tree) -> Tree:
    """Leaves as data: of their own memory, without a graph."""
    return tree_map(lambda v: v.detach().clone(), state)
