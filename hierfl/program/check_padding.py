"""Checks that padded rows count for nothing, and that mini-batches may stand for all rows of a client.

Clients with different numbers of rows are padded to the largest, and a program must give the same log density
padded as alone. This is tested on a few rows of one client, at random values of the params and the latent
sites: at their starting values, which are often 0, a dependence may not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from hierfl.data.batch import ClientBatch, gather, keys_of
from hierfl.data.clients import ClientData
from hierfl.program.handlers import Answer, untouched_store
from hierfl.program.joint_sites import in_data
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Values
from hierfl.program.traces import in_clients, samples, scored

FEW, PADDED = 4, 6  # rows of the client that is tested: alone, and padded
ROUNDING, ROUNDING_SINGLE = (
    1e-5,
    1e-3,
)  # relative differences; the second where double precision fails
LEAST = 1e-2  # nats; the differences of smaller terms are relative to it
AWAY = (
    0.1,
    0.01,
    0.0,
)  # how far params and sites are put from their starting values, tried in turn

Evaluate = Callable[[float, ClientBatch], Values]


def is_ragged(data: ClientData) -> bool:
    """Return whether clients differ in their numbers of rows, so that some are padded."""
    return bool((data.counts != data.counts[0]).any())


def check_padding(program: Program, data: ClientData) -> None:
    """Refuse a program whose log density depends on padded rows. Clients of equal sizes are not padded.

    Args:
        program: to check.
        data: the clients it will run on.

    Raises:
        ProgramError: a site differs between some rows alone and the same rows padded; the message names it.
    """
    if not is_ragged(data):
        return
    alone, padded = _made_up(program, data), _made_up(program, data, PADDED)
    few = alone.num_rows

    def of_guide(away: float, batch: ClientBatch) -> Values:
        return _of_guide(program, away, batch)

    def of_model(away: float, batch: ClientBatch) -> Values:
        return _of_model(program, away, batch, torch.arange(few))

    found = None
    if not _is_ours(program.guide):
        found = _first_difference(of_guide, alone, padded)
    what = "the guide's site" if found else "site"
    found = found or _first_difference(of_model, alone, padded)
    if found:
        raise ProgramError(
            f"{what} '{found}' depends on padding, since {few} rows of a client give another value padded to "
            f"{padded.num_rows} than alone: reduce over rows by batch.sum and batch.mean, or leave padded "
            f"rows out by batch.mask()"
        )


def check_mini_batches(program: Program, data: ClientData, *, priors_alone: bool = False) -> None:
    """Refuse a program whose log density is not a sum over rows, each a function of its own row alone.

    Mini-batches hold some rows of a client in random order, and stand for all of them. What is computed from
    several rows, such as the row before (an autoregression) or a mean, is another thing there.

    Args:
        program: to check. A model with the attribute `normalises_by_batch` is let pass: its rows are
            normalised by the mini-batch on purpose.
        data: the clients it will run on.
        priors_alone: the steps on mini-batches evaluate no likelihood, so check the latent sites alone.

    Raises:
        ProgramError: a site depends on several rows of its client; the message names it.
    """
    found = None if priors_alone else next(iter(program.joint), None)
    by_batch = getattr(program.model, "normalises_by_batch", False)
    if found is None and not by_batch and int(data.counts.max()) > 1:
        found = _of_several_rows(program, _made_up(program, data), priors_alone)
    if found:
        raise ProgramError(
            f"site '{found}' depends on several rows of its client at once, and mini-batches hold only some "
            f"of them, in random order: "
            + (
                "compute it from a client field, or take another method, such as fedsvi"
                if priors_alone
                else "leave batch_size at None, or give each row what it needs of other rows as a field "
                "of its own, data.with_fields(previous=...)"
            )
        )


def _of_several_rows(program: Program, alone: ClientBatch, priors_alone: bool) -> str | None:
    """Return a site whose term of a row changes when the order is reversed and the first row left out."""
    few = alone.num_rows
    back = torch.arange(few - 1, 0, -1)
    fields = {name: v.index_select(1, back) for name, v in alone.fields.items()}
    latent = {site.name for site in program.latents.sites}

    def evaluate(away: float, batch: ClientBatch) -> Values:
        keep = back if batch.num_rows == few else torch.arange(few - 1)
        found = _of_model(program, away, batch, keep, derived=False)
        return {n: v for n, v in found.items() if n in latent or not priors_alone}

    return _first_difference(evaluate, alone, replace(alone, fields=fields))


def check_labels_given(program: Program, rows: ClientData) -> None:
    """Refuse to predict unlabelled rows where a site is computed from labels, as an autoregression is.

    Args:
        program: the checked program.
        rows: to be predicted.

    Raises:
        ValueError: the distribution of a site depends on a label that the rows do not have.
    """
    for label in set(program.labels.values()) - {*rows.fields, *rows.client_fields}:
        site = computed_from(program, label)
        if site:
            raise ValueError(
                f"site '{site}' is computed from field '{label}', which the rows do not have: give the "
                f"rows their labels"
            )


def computed_from(program: Program, label: str) -> str | None:
    """Return an observed site whose distribution depends on a label of rows; None or "" where none does."""
    prototype = program.prototype
    if label not in prototype.fields:
        return None
    value = prototype.fields[label]
    other = ~value if value.dtype == torch.bool else value + 1
    changed = replace(prototype, fields={**prototype.fields, label: other})

    def evaluate(away: float, batch: ClientBatch) -> Values:
        params, values = _point(program, away)
        found = program.observed(values, batch, params)
        labels = program.observed(values, prototype, params)
        return {site: fn.log_prob(labels[site][1]) for site, (fn, _) in found.items()}

    return _first_difference(evaluate, prototype, changed)


# ------------------------------------------------------------------------------------------------ batches
def _made_up(program: Program, data: ClientData, rows: int | None = None) -> ClientBatch:
    """Return a client made up of a few rows of all clients that differ in their labels, padded to `rows`."""
    index = _unlike(data, tuple(program.labels.values()))
    few = len(index)
    rows = few if rows is None else rows
    inside = (torch.arange(rows) < few)[None]
    first = torch.zeros(1, dtype=torch.long)
    index = torch.cat([index, index[:1].expand(rows - few)])[None]
    batch = gather(data, first, index, inside if rows > few else None, keys_of(data, first, 0, 0))
    batch = replace(batch, counts=torch.full_like(batch.counts, few))
    return _with_labels(program, batch)


def _unlike(data: ClientData, labels: tuple[str, ...]) -> Tensor:
    """Return the positions of up to `FEW` rows, those of extreme labels first."""
    n = data.num_rows
    extreme = [
        int(at)
        for values in (data.fields.get(name) for name in labels)
        if values is not None and values.dim() == 1
        for at in (values.to(torch.float64).argmin(), values.to(torch.float64).argmax())
    ]
    even = torch.linspace(0, n - 1, min(FEW, n)).long().tolist()
    return torch.tensor(sorted(list(dict.fromkeys([*extreme, *even]))[:FEW]))


def _with_labels(program: Program, batch: ClientBatch) -> ClientBatch:
    """Fill in missing labels with those of the prototype's first row."""
    like = {name: program.prototype.fields.get(name) for name in program.labels.values()}
    missing = {
        name: value[:, :1].expand(batch.num_clients, batch.num_rows, *value.shape[2:])
        for name, value in like.items()
        if value is not None and name not in batch.fields
    }
    return replace(batch, fields={**batch.fields, **missing})


def _is_ours(guide: Any) -> bool:
    """Return whether a guide is of hierfl's own families, which leave padded rows out (as their tests show)."""
    return str(getattr(guide, "__module__", "")).split(".")[0] == "hierfl"


# ------------------------------------------------------------------------------------------------ evaluation
def _point(program: Program, away: float) -> tuple[Params, Values]:
    """Return params and latent sites at random, near their starting values."""
    g = torch.Generator().manual_seed(0)

    def moved(start: Tensor) -> Tensor:
        start = start.to(torch.get_default_dtype()) if start.is_floating_point() else start
        return start + away * torch.randn(start.shape, generator=g)

    params = {spec.name: moved(spec.start) for spec in program.params}
    values: Values = {}
    for block in (program.latents.global_block, program.latents.local_block):
        if block.sites:
            values |= block.unflatten(moved(block.start))[0]
    return params, values


def _of_model(
    program: Program, away: float, batch: ClientBatch, keep: Tensor, *, derived: bool = True
) -> Values:
    """Return the log density of each local site, by row in the data plate, and the deterministic sites."""
    params, values = _point(program, away)
    with Answer(params, batch):
        trace = poutine.trace(poutine.condition(program.model, data=values)).get_trace(batch)
    found: Values = {}
    for name, site in samples(trace):
        if in_clients(site) and name not in program.derived:
            term = scored(site, site["fn"].log_prob(site["value"]))
            found[name] = term.index_select(-1, keep) if in_data(site) else term
    if derived:
        found |= {name: trace.nodes[name]["value"] for name in program.derived}
    return found


def _of_guide(program: Program, away: float, batch: ClientBatch) -> Values:
    """Return the draws of a guide and their log densities."""
    params, _ = _point(program, away)
    with Answer(params, batch):
        trace = poutine.trace(program.guide).get_trace(batch)
    found: Values = {}
    for name, site in samples(trace):
        density = site["fn"].log_prob(site["value"])
        found[name] = torch.cat([site["value"].flatten(), density.flatten()])
    return found


def _first_difference(evaluate: Evaluate, one: ClientBatch, other: ClientBatch) -> str | None:
    """Return the first site that differs between two batches by more than rounding.

    A difference found in single precision is looked at again in double; where the program cannot be run in
    double, a larger difference counts.
    """
    with untouched_store(), torch.no_grad(), pyro.validation_enabled(False):
        found = _differing(evaluate, one, other, ROUNDING)
        if not found or torch.get_default_dtype() == torch.float64:
            return found
        with _double():
            again = _differing(evaluate, _in_double(one), _in_double(other), ROUNDING)
        # "" where no value of the params could be evaluated
        return again if again != "" else _differing(evaluate, one, other, ROUNDING_SINGLE)


def _differing(
    evaluate: Evaluate, one: ClientBatch, other: ClientBatch, rounding: float
) -> str | None:
    """Return the first site that differs between two batches, None where none does, "" where all fails."""
    for away in AWAY:
        try:
            first, second = evaluate(away, one), evaluate(away, other)
        except (RuntimeError, ValueError, NotImplementedError, IndexError):
            continue  # such as a point outside what the program can compute
        if all(bool(v.isfinite().all()) for v in first.values() if v.is_floating_point()):
            names = (n for n, v in first.items() if _differ(v, second.get(n), rounding))
            return next(names, None)
    return ""


def _differ(one: Tensor, other: Tensor | None, rounding: float) -> bool:
    if other is None or one.shape != other.shape:
        return True
    scale = one.abs().max().clamp(min=LEAST) if one.numel() else 1.0
    return not bool(((one - other).abs() <= rounding * scale).all())


@contextmanager
def _double() -> Iterator[None]:
    """Run in double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _in_double(batch: ClientBatch) -> ClientBatch:
    def wide(v: Tensor) -> Tensor:
        return v.double() if v.is_floating_point() else v

    return replace(
        batch,
        fields={name: wide(v) for name, v in batch.fields.items()},
        client_fields={name: wide(v) for name, v in batch.client_fields.items()},
        counts=wide(batch.counts),
    )
