"""Checks that neither padded rows nor other clients in a batch change a log density."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from hierfl.data.batch import ClientBatch, gather, keys_of, mapped
from hierfl.data.clients import ClientData
from hierfl.program.few_rows import distinct_rows, first_difference, made_up, point
from hierfl.program.handlers import AT_MIDDLES, Substitute
from hierfl.program.program import Params, Program, ProgramError, stacked
from hierfl.program.sites import Values
from hierfl.program.traces import NAME, in_clients, in_data, per_client, samples, scored

PADDED = 6  # rows to which the few are padded


def is_ragged(data: ClientData) -> bool:
    """Return whether clients differ in their numbers of rows, so that some are padded."""
    return bool((data.counts != data.counts[0]).any())


def check_padding(program: Program, data: ClientData) -> None:
    """Refuse a program whose log density depends on padded rows."""
    if not is_ragged(data):
        return
    alone, padded = made_up(program, data), made_up(program, data, PADDED)
    rows, site = alone.num_rows, None
    ours = str(getattr(program.guide, "__module__", "")).split(".")[0] == "hierfl"
    if not ours:  # hierfl's own families leave padded rows out
        site = first_difference(partial(_of_guide, program), alone, padded)
    what = "the guide's site" if site else "site"
    of_model = partial(_of_model, program, keep=torch.arange(rows))
    site = site or first_difference(of_model, alone, padded)
    if site:
        raise ProgramError(
            f"{what} '{site}' depends on padding, since {rows} rows of a client give another value "
            f"padded to {padded.num_rows} than alone: reduce over rows by batch.sum and "
            "batch.mean, or leave padded rows out by batch.mask()"
        )


def check_mini_batches(
    program: Program, data: ClientData, *, priors_alone: bool = False, halves: bool = False
) -> None:
    """Refuse a log density that is no sum over rows, since mini-batches stand for all rows."""
    site = None if priors_alone else next(iter(program.joint), None)
    by_batch = getattr(program.model, "normalizes_by_batch", False)
    if site is None and not by_batch and data.num_rows > 1:
        site = _of_several_rows(program, made_up(program, data), priors_alone)
    if site:
        why, fix = (
            "mini-batches hold only some of them, in random order",
            "leave batch_size at None",
        )
        if halves:
            why = "the method splits them at random into two halves"
            fix = "set split=False and batch_size=None"
        fix += ", or give each row what it needs of other rows as a field of its own, "
        fix += "data.with_fields(previous=...)"
        if priors_alone:
            fix = "compute it from a client field, or take another method, such as fedsvi"
        raise ProgramError(
            f"site '{site}' depends on several rows of its client at once, and {why}: {fix}"
        )


def _of_several_rows(program: Program, alone: ClientBatch, priors_alone: bool) -> str | None:
    """Return a site whose terms change if rows are reversed and the first one left out."""
    rows = alone.num_rows
    back = torch.arange(rows - 1, 0, -1)
    fields = {name: v.index_select(1, back) for name, v in alone.fields.items()}
    sites = set(map(NAME, program.latents.sites)) if priors_alone else None

    def evaluate(away: float, batch: ClientBatch) -> Values:
        keep = back if batch.num_rows == rows else torch.arange(rows - 1)
        token = AT_MIDDLES.set(True)
        try:
            return _of_model(program, away, batch, keep, derived=False, sites=sites)
        finally:
            AT_MIDDLES.reset(token)

    return first_difference(evaluate, alone, replace(alone, fields=fields))


def check_labels_given(program: Program, rows: ClientData) -> None:
    """Refuse to predict unlabeled rows if a site is computed from labels (autoregression)."""
    for label in set(program.labels.values()) - {*rows.fields, *rows.client_fields}:
        site = computed_from(program, label)
        if site:
            raise ValueError(
                f"site '{site}' is computed from field '{label}', which the rows do not have: give "
                "the rows their labels"
            )


def computed_from(program: Program, label: str) -> str | None:
    """Return an observed site whose distribution depends on a label of rows, or None."""
    prototype = program.prototype
    if label not in prototype.fields:
        return None
    value = prototype.fields[label]
    other = ~value if value.dtype == torch.bool else value + 1
    changed = replace(prototype, fields={**prototype.fields, label: other})

    def evaluate(away: float, batch: ClientBatch) -> Values:
        params, values = point(program, away)
        observed = program.observed(values, batch, params)
        labels = program.observed(values, prototype, params)
        return {site: fn.log_prob(labels[site][1]) for site, (fn, _) in observed.items()}

    return first_difference(evaluate, prototype, changed)


def _of_model(
    program: Program,
    away: float,
    batch: ClientBatch,
    keep: Tensor,
    *,
    derived: bool = True,
    sites: Collection[str] | None = None,
) -> Values:
    """Return log densities of local sites, by row in the data plate, and deterministic sites."""
    params, values = point(program, away)
    with Substitute(params, batch):
        trace: Any = poutine.trace(poutine.condition(program.model, data=values)).get_trace(batch)
    terms: Values = {}
    for name, site in samples(trace):
        is_chosen = sites is None or name in sites
        if is_chosen and in_clients(site) and name not in program.derived:
            term = scored(site, site["fn"].log_prob(site["value"]))
            terms[name] = term.index_select(-1, keep) if in_data(site) else term
    for name in program.derived if derived else ():
        terms[name] = trace.nodes[name]["value"]
    return terms


def _of_guide(program: Program, away: float, batch: ClientBatch) -> Values:
    params, _ = point(program, away)
    with Substitute(params, batch):
        trace = poutine.trace(program.guide).get_trace(batch)
    sites: Values = {}
    for name, site in samples(trace):
        density = site["fn"].log_prob(site["value"])
        sites[name] = torch.cat([site["value"].flatten(), density.flatten()])
    return sites


def check_apart(program: Program, data: ClientData) -> None:
    """Refuse a program in which a client's log density depends on others in its batch."""
    if data.num_clients == 1:
        return
    distinct = distinct_rows(data, tuple(program.labels.values()))
    rows = max(PADDED, len(distinct))
    index = torch.stack(
        [distinct[torch.arange(rows) % len(distinct)], distinct.flip(0)[:1].expand(rows)]
    )
    ids = torch.tensor([0, data.num_clients - 1])
    pair = gather(data, ids, index, None, keys_of(data, ids, 0, 0))
    pair = replace(pair, counts=torch.full_like(pair.counts, rows))
    first = replace(mapped(pair, lambda v: v[:1]), own_keys=pair.own_keys[:1])

    def evaluate(away: float, batch: ClientBatch) -> Values:
        params, values = _of_clients(program, away, batch.num_clients)
        with Substitute(params, batch):
            trace = poutine.trace(poutine.condition(program.model, data=values)).get_trace(batch)
        terms: Values = {}
        for name, site in samples(trace):
            if in_clients(site):
                density = scored(site, site["fn"].log_prob(site["value"]))
                terms[name] = per_client(density)[:1]
        return terms

    if dependent := first_difference(evaluate, first, pair):
        raise ProgramError(
            f"site '{dependent}' depends on which clients are in the batch, and here all of them are: "
            "reduce over the rows of each client, by batch.mean and batch.sum, not over clients"
        )


def _of_clients(program: Program, away: float, count: int) -> tuple[Params, Values]:
    """Return params and latent sites of clients; the first client's do not vary with `count`."""
    points = [point(program, away, seed=seed) for seed in range(count)]
    params, values = points[0]
    local = [spec.name for spec in program.params if spec.is_local]
    own = {name: torch.stack([p[name] for p, _ in points]) for name in local}
    sites = dict(values)
    for site in program.latents.local_block.sites:
        axis = len(site.batch_shape) - 2
        sites[site.name] = torch.cat([v[site.name] for _, v in points], axis)
    return {**params, **stacked(program, own)}, sites
