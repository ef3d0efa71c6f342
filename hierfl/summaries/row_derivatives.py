"""The derivatives of many rows' log likelihoods up to the fourth, contracted to those of clients.

A row reads predictors eta = x . l and the numbers s: its derivatives in these few numbers are sums of
products of rows' columns away from those in v, in one pass.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import combinations_with_replacement, pairwise
from math import factorial, prod
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.process import CPU
from hierfl.summaries.packed_rows import PackedRows, gradients
from hierfl.summaries.quartic import Quartic, monomials

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
