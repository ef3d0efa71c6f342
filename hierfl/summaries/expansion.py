"""Which clients' log likelihoods a polynomial of degree 4 stands for, and how far off it is.

A client of many rows is first climbed on a few of them, then by whole Newton steps; its polynomial is
about where it ends. It is used where its terms of degree 4 are small, and at draws where its error,
measured by all rows at some of them, is below a stated size.

A row reads predictors eta = x . l and the numbers s: its derivatives in these few numbers are sums of
products of rows' columns away from those in v, in one pass.
"""

import math
from collections import Counter
from functools import lru_cache
from itertools import combinations_with_replacement, pairwise
from math import factorial, prod
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import Factor, inverse_root, times
from hierfl.core.importance_sampling import normal_points
from hierfl.core.process import CPU
from hierfl.summaries.conditional import normals_of
from hierfl.summaries.factor import climbed, positive, q_of, root_of, settled, step_of
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.packed_rows import PackedRows, gradients
from hierfl.summaries.quartic import Quartic, monomials
from hierfl.summaries.reading import QuadratureNodes

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


ROWS_AT_ONCE = 1 << 14  # whose derivatives and products are carried at once
Index = tuple[int, ...]  # of the derivatives in s, ascending


class _QuarticPlan(NamedTuple):
    """Where each coefficient of a quartic stands among sums of products."""

    columns: dict[Index, list[int]]  # index in s -> column of each order in eta
    place: Tensor  # (P,) in the sums, one block after another
    share: Tensor  # (P,) one over the factorials


@lru_cache(maxsize=16)
def _plan(inside: Index, others: Index) -> _QuarticPlan:
    """Return the plan for positions in v of l and of s."""
    size, lines = len(inside) + len(others), len(inside)
    line, other = ({at: i for i, at in enumerate(of)} for of in (inside, others))
    pairs = {of: i for i, of in enumerate(combinations_with_replacement(range(lines), 2))}
    columns, start, end, count = dict[Index, list[int]](), dict[tuple[Index, int], int](), 0, 0
    widths = (1, lines, len(pairs), len(pairs) * lines, len(pairs) ** 2)
    for degree in range(5):
        for index in combinations_with_replacement(range(len(others)), degree):
            orders = range(5 - degree if lines else 1)
            columns[index] = [count + order for order in orders]
            count += len(orders)
            for order in orders:
                start[index, order], end = end, end + widths[order]
    places, shares = [], []
    for of in monomials(size).tuples:
        at = [i - 1 for i in of if i]
        index = tuple(other[i] for i in at if i in other)
        own = tuple(line[i] for i in at if i in line)
        first = 0
        if len(own) == 1:
            first = own[0]
        elif len(own) == 2:
            first = pairs[own]
        elif len(own) == 3:
            first = pairs[own[:2]] * lines + own[2]
        elif len(own) == 4:
            first = pairs[own[:2]] * len(pairs) + pairs[own[2:]]
        places.append(start[index, len(own)] + first)
        shares.append(1.0 / prod(map(factorial, Counter(at).values())))
    share = torch.tensor(shares, dtype=torch.float64, device=CPU)
    return _QuarticPlan(columns, torch.tensor(places, device=CPU), share)


def quartic_of(rows: PackedRows, center: Tensor) -> Quartic:
    """Return the polynomials of C clients about centers (C, V), in one pass over their rows."""
    line, x = rows.line, rows.design
    plan = _plan(tuple(line.inside.tolist()), tuple(line.rest.tolist()))
    shift = (x @ center[:, line.inside][rows.client][..., None])[..., 0]
    others = center[:, line.rest][rows.client]
    ends = torch.bincount(rows.client, minlength=rows.clients).cumsum(0)
    sums: list[Tensor | None] = [None] * rows.clients
    for block in torch.arange(len(x)).split(ROWS_AT_ONCE):
        derivatives = _derivatives(rows, shift[block], others[block], block, plan)
        inner = [int(e) for e in ends if block[0] < e <= block[-1]]
        for first, last in pairwise(sorted({int(block[0]), *inner, int(block[-1]) + 1})):
            k, own = int(rows.client[first]), slice(first - int(block[0]), last - int(block[0]))
            own_sums = _products(x[first:last], [v[own] for v in derivatives], plan)
            before = sums[k]
            sums[k] = own_sums if before is None else before + own_sums
    whole = torch.stack([v for v in sums if v is not None])
    return Quartic(center, whole[:, plan.place] * plan.share.to(whole))


def _derivatives(
    rows: PackedRows, shift: Tensor, others: Tensor, block: Tensor, plan: _QuarticPlan
) -> list[Tensor]:
    """Return derivatives by columns of the plan: (n,) of order 0 in eta, and (n, p) of the others."""
    own, times = [v[block] for v in rows.tensors], rows.units.times
    columns_of_rows = list[Tensor]()
    with torch.enable_grad():
        eta, at = shift.detach().requires_grad_(), others.detach().requires_grad_()
        value = rows.over_units(rows.of_unit, eta, at, *own)
        by_index: dict[Index, Tensor] = {(): value if times is None else value * times[block]}
        for index, columns in plan.columns.items():
            if index and index not in by_index:
                parent = by_index[index[:-1]]
                slopes = gradients(parent.sum(), (at,), create=True)[0]
                for j in range(index[-1], at.shape[1]):
                    by_index[(*index[:-1], j)] = slopes[:, j]
            here = by_index[index]
            columns_of_rows.append(here.detach())
            for _ in columns[1:]:
                here = gradients(here.sum(), (eta,), create=True)[0]
                columns_of_rows.append(here.detach())
    return columns_of_rows


def _products(x: Tensor, derivatives: list[Tensor], plan: _QuarticPlan) -> Tensor:
    """Return the sums over one client's rows, x (n, p, L), of derivatives times columns, flat."""
    flat = x.flatten(0, 1)
    i, j = torch.triu_indices(flat.shape[1], flat.shape[1])
    pairs = flat[:, i] * flat[:, j]
    sums = []
    for columns in plan.columns.values():
        for order, column in enumerate(columns):
            d = derivatives[column].flatten()
            if order == 0:
                sums.append(d.sum()[None])
            elif order <= 2:
                sums.append(d @ (flat if order == 1 else pairs))
            else:
                by = flat if order == 3 else pairs
                sums.append((pairs.mT @ (by * d[:, None])).flatten())
    return torch.cat(sums)
