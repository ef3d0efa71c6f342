"""Which clients' log likelihoods a polynomial of degree 4 stands for, and how far off it is.

A client of many rows is first climbed on a few of them, then by whole Newton steps; its polynomial is
about where it ends (`hierfl.summaries.row_derivatives`). It is used where its terms of degree 4 are
small, and at draws where its error, measured by all rows at some of them, is below a stated size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import Factor, inverse_root, times
from hierfl.core.importance_sampling import normal_points
from hierfl.summaries.conditional import normals_of
from hierfl.summaries.factor import climbed, positive, q_of, root_of, settled, step_of
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.packed_rows import PackedRows
from hierfl.summaries.quartic import Quartic, monomials
from hierfl.summaries.reading import QuadratureNodes
from hierfl.summaries.row_derivatives import quartic_of

LEAST_ROWS = 500  # of a client; with fewer its rows are as fast
MOST_NUMBERS, MOST_OTHERS = (
    12,
    3,
)  # V and, of these, numbers that enter in another way than by a line
MOST_KEPT = 1 << 20  # coefficients of all clients: 8 MB
THINNED, FEW_ROWS = 16, 250  # one of so many rows, and so many of a client, for the first steps
WHOLE, CLOSE = 5, 0.5  # most Newton steps by all rows; nats that the last one gains
QUIET, POINTS = 0.1, 64  # largest sd of the terms of degree 4 under q, in nats, and its points
NEAR = 16.0  # squared standard errors of the rows that the mean of q may lie from the center
# draws at which the polynomial is compared with all rows; sd of the error of all clients, in nats
CHECKED, ERROR = 8, 0.05


class ClientPolynomials(NamedTuple):
    """Polynomials of C clients, and for which of them it stands for the rows."""

    quartic: Quartic
    fits: Tensor  # (C,) bool


def coefficients_of(hierarchy: Hierarchy, others: int, *, by_row: bool) -> int:
    """Return P, how many coefficients each client keeps; 0 where polynomials are not used."""
    size = hierarchy.reading.size
    is_small = size <= MOST_NUMBERS and others <= MOST_OTHERS and hierarchy.mixing is None
    count = len(monomials(size).tuples) if is_small and by_row else 0
    return count if count * hierarchy.program.num_clients <= MOST_KEPT else 0


def expanded(rows: PackedRows, belief: tuple[Tensor, Tensor]) -> ClientPolynomials:
    """Return polynomials about the modes of Normal(v; `belief`) p(y | v), in a few passes."""
    loc, prior = belief
    root = root_of(prior)
    mean = climbed(rows.thinned(THINNED, FEW_ROWS), loc, prior)[0]
    close = torch.zeros(rows.clients, dtype=torch.bool)
    for _ in range(WHOLE):
        there = rows.at_mean(mean, prior.expand(rows.clients, -1, -1))
        pull = there.slope - (mean - loc) @ prior
        step = step_of(pull, prior + positive(there.curvature, root)[0], root)
        mean = torch.where(close[:, None], mean, mean + step)
        close = close | ((step * pull).sum(1).abs() < CLOSE)
        if bool(close.all()):
            break
    quartic = quartic_of(rows, mean.nan_to_num())
    return ClientPolynomials(quartic, close & quartic.terms.isfinite().all(1))


def factors_by(
    expansion: ClientPolynomials, belief: tuple[Tensor, Tensor], nodes: QuadratureNodes
) -> tuple[Factor, Tensor]:
    """Return factors by polynomials, and for which clients these stand for the rows, (C,) bool."""
    prior = belief[1]
    quartic, every = expansion.quartic, torch.ones(expansion.quartic.clients, dtype=torch.bool)
    curvature = quartic.at_mean(quartic.center, prior).curvature
    start = prior + positive(curvature, root_of(prior))[0]
    factor = settled(quartic, belief, nodes, quartic.center, start, every)
    return factor, expansion.fits & is_quiet(quartic, belief, factor)


def is_quiet(quartic: Quartic, belief: tuple[Tensor, Tensor], factor: Factor) -> Tensor:
    """Return for which clients terms of degree 4 are small about the q of their factors, (C,) bool."""
    mean, precision = q_of(belief, factor)
    points = normal_points(POINTS, mean.shape[1])
    root = inverse_root(precision)[0]
    values = quartic.highest().values(mean[:, None] + points @ root.mT)
    away = mean - quartic.center
    moved = (times(factor.precision, away) * away).sum(1)
    return (values.std(1) < QUIET) & (moved < NEAR) & (factor.raised == 0)


def error_at_draws(
    hierarchy: Hierarchy,
    rows: PackedRows,
    quartic: Quartic,
    where: tuple[dict[str, Tensor], tuple[Tensor, Tensor]],
    draws: Tensor,
) -> Tensor:
    """Return the sd of the polynomials' error, (C,), by rows at v of some draws of z, (S, K).

    `where` holds the clients' fields and factors.
    """
    fields, factor = where
    some = draws[:: max(1, len(draws) // CHECKED)][:CHECKED]
    v = some[:, hierarchy.reading.shared].expand(rows.clients, -1, -1)
    if hierarchy.normal_size:
        mean, tril = normals_of(hierarchy, fields, factor, some)
        e = normal_points(len(some), mean.shape[-1])
        v = torch.cat([mean + (tril @ e[..., None])[..., 0], v], -1)
    return (rows.values(v) - quartic.values(v)).std(1)


def is_right(error: Tensor, clients: int) -> Tensor:
    """Return which errors (C,) are small where so many clients' add up, (C,) bool."""
    return error < ERROR / math.sqrt(clients)
