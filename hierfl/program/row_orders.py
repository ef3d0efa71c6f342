"""How many nodes the integrals over the sites of a program's rows need: as many as change nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from pyro import poutine
from torch import Tensor

from hierfl.core.process import double_precision
from hierfl.data.batch import ClientBatch, gather, in_double, keys_of, rows_along
from hierfl.data.clients import ClientData
from hierfl.program.quadrature import integral, is_quadratic
from hierfl.program.row_runs import RowTerm, Structure
from hierfl.program.row_sites import Integrating, RowSites, integrated
from hierfl.program.row_structure import Fixed, structure_of, unchecked_runs
from hierfl.program.sites import Model
from hierfl.program.traces import Center, Near

MOST_ROWS = 20_000  # at which a program is compared with itself, padding included
ORDERS = {
    1: (5, 9, 15, 25, 41, 65),
    2: (7, 11, 17, 25),
}  # numbers of a row -> nodes of each, tried in turn
UNCHANGED = 0.02  # nats of all rows together
# where integrals are compared: the centers of priors, and points near them, each at another label
POINTS, AWAY = 3, 0.5
MOST_LABELS = 16  # of a discrete site that are tried


def without_row_sites(model: Model, data: ClientData) -> tuple[Model, Structure | None]:
    """Return a program whose rows have no continuous latent sites, and what was integrated out."""
    batch = _rows_of(data)
    structure = structure_of(model, batch)
    if structure is None:
        return model, None
    with unchecked_runs(), double_precision():
        terms: dict[str, RowTerm] = {}
        for name, term in structure.terms.items():
            so_far = replace(structure, terms=terms)
            terms[name] = _ordered(model, in_double(batch), so_far, term, data.num_rows)
    structure = replace(structure, terms=terms)
    return integrated(model, structure), structure


def _rows_of(data: ClientData) -> ClientBatch:
    """Return rows of clients: all rows where they are few."""
    counts, chosen = data.counts.tolist(), list[int]()
    for client in data.by_name.tolist():
        if chosen and (len(chosen) + 1) * max(counts[i] for i in (*chosen, client)) > MOST_ROWS:
            break
        chosen.append(client)
    ids = torch.tensor(chosen)
    width = min(MOST_ROWS, max(counts[client] for client in chosen))
    inside, index = rows_along(data, ids, width)
    return gather(data, ids, index, inside, keys_of(data, ids, 0, 0))


def _ordered(
    model: Model, batch: ClientBatch, structure: Structure, term: RowTerm, num_rows: int
) -> RowTerm:
    """Return a term with as many nodes as change nothing; Laplace's approximation of many numbers."""
    if term.steps:
        return term
    mask, shape = batch.mask(), torch.Size((batch.num_clients, batch.num_rows))
    first, labels = _rows_at(model, batch, structure, 0)
    seeds = range(1, max(POINTS, min(labels, MOST_LABELS)))
    points = [first, *(_rows_at(model, batch, structure, seed)[0] for seed in seeds)]
    centers = [rows.center(term, shape) for rows in points]
    # the modes are the same at any order
    fits = [
        (rows.density(term, None, last=True), rows.place(term, None, shape, last=True))
        for rows in points
    ]
    quadratic = [
        is_quadratic(log, center, place)[mask].all()
        for center, (log, place) in zip(centers, fits, strict=True)
    ]
    term = term._replace(quadratic=all(quadratic))
    size = centers[0].shape[-1]
    if size not in ORDERS:
        return term

    def at(order: int) -> list[Tensor]:
        return [integral(log, place, order) for log, place in fits]

    sums = at(ORDERS[size][0])
    for order, larger in pairwise(ORDERS[size]):
        before, sums = sums, at(larger)
        changes = [(a - b)[mask].abs().mean() for a, b in zip(before, sums, strict=True)]
        if float(torch.stack(changes).max()) * num_rows < UNCHANGED:
            return term._replace(order=order)
    return term._replace(order=ORDERS[size][-1])


def _rows_at(
    model: Model, batch: ClientBatch, structure: Structure, seed: int
) -> tuple[RowSites, int]:
    """Return a program's rows near the centers of its priors, at a label, and how many labels there are."""
    rows, fixed = RowSites(model, batch, structure), Fixed({}, label=seed)
    with Center(), fixed, Near(AWAY * min(seed, 1), seed), Integrating(rows):
        poutine.trace(model).get_trace(batch)
    return rows, fixed.labels
