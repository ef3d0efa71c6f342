"""A few rows, and random params (0 may hide a dependence), to compare a program with itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hierfl.core.process import double_precision
from hierfl.core.user_warnings import warn
from hierfl.data.batch import (
    ClientBatch,
    gather,
    in_double,
    keys_of,
)
from hierfl.data.clients import ClientData
from hierfl.program.handlers import unchecked, untouched_store
from hierfl.program.program import Params, Program
from hierfl.program.sites import Values

FEW = 4  # rows
# relative differences that are rounding; the second where double precision is impossible
ROUNDING, ROUNDING_SINGLE = 1e-5, 1e-3
LEAST = 1e-2  # nats; the differences of smaller terms are relative to it
# how far params and sites are put from their starting values, tried in turn
AWAY = (0.1, 0.01, 0.0)

Evaluate = Callable[[float, ClientBatch], Values]


def made_up(program: Program, data: ClientData, rows: int | None = None) -> ClientBatch:
    """Return a client of a few rows of all clients with different labels, padded to `rows`."""
    index = distinct_rows(data, tuple(program.labels.values()))
    count = len(index)
    rows = count if rows is None else rows
    inside = (torch.arange(rows) < count)[None]
    first = torch.zeros(1, dtype=torch.long)
    index = torch.cat([index, index[:1].expand(rows - count)])[None]
    batch = gather(data, first, index, inside if rows > count else None, keys_of(data, first, 0, 0))
    return labeled(program, replace(batch, counts=torch.full_like(batch.counts, count)))


def labeled(program: Program, batch: ClientBatch) -> ClientBatch:
    """Give rows without labels those of the prototype's first row, inside their support."""
    fields, labels = dict(batch.fields), program.prototype.fields
    for name in program.labels.values():
        if name in labels and name not in fields:
            label = labels[name][:, :1]
            fields[name] = label.expand(batch.num_clients, batch.num_rows, *label.shape[2:])
    return replace(batch, fields=fields)


def distinct_rows(data: ClientData, labels: tuple[str, ...]) -> Tensor:
    """Return the positions of up to `FEW` rows, those of extreme labels first."""
    at = torch.linspace(0, data.num_rows - 1, min(FEW, data.num_rows)).long().tolist()
    extreme: list[int] = []
    for name in labels:
        values = data.fields.get(name)
        # of rows that are not there, all values are one
        if values is not None and values.dim() == 1 and values.stride(0):
            values = values.byte() if values.dtype == torch.bool else values
            extreme += [int(values.argmin()), int(values.argmax())]
    return torch.tensor(sorted(list(dict.fromkeys([*extreme, *at]))[:FEW]))


def point(program: Program, away: float, seed: int = 0) -> tuple[Params, Values]:
    """Return params and latent sites of one client at random, near their starting values."""
    g = torch.Generator().manual_seed(seed)

    def moved(start: Tensor) -> Tensor:
        start = start.to(torch.get_default_dtype()) if start.is_floating_point() else start
        return start + away * torch.randn(start.shape, generator=g)

    params: Params = {}
    values: Values = {}
    for spec in program.params:
        params[spec.name] = moved(spec.start)
    for block in (program.latents.global_block, program.latents.local_block):
        if block.sites:
            values |= block.unflatten(moved(block.start))[0]
    return params, values


def first_difference(evaluate: Evaluate, first: ClientBatch, second: ClientBatch) -> str | None:
    """Return the first site that differs between two batches by more than rounding."""
    with untouched_store(), torch.no_grad(), unchecked():
        site = _differing(evaluate, first, second, ROUNDING)
        if site and torch.get_default_dtype() != torch.float64:
            with double_precision():
                again = _differing(evaluate, in_double(first), in_double(second), ROUNDING)
            site = again if again != "" else _differing(evaluate, first, second, ROUNDING_SINGLE)
    if site == "":
        warn(
            "the program cannot be evaluated on a few rows near its starting values, so whether it "
            "depends "
            "on padding or on other rows is not known: compare it with engine='sequential'",
        )
    return site or None


def _differing(
    evaluate: Evaluate, batch: ClientBatch, another: ClientBatch, rounding: float
) -> str | None:
    """Return the first site that differs between two batches, None if none, "" if all fails."""
    site: str | None = ""
    for away in AWAY:
        try:
            first, second = evaluate(away, batch), evaluate(away, another)
        except Exception:  # whatever a user's program raises outside of what it can compute
            continue
        site, finite = None, True
        for name, value in first.items():
            if site is None and _differ(value, second.get(name), rounding):
                site = name
            finite = finite and bool(value.isfinite().all())
        if finite:
            return site
    return site


def _differ(first: Tensor, second: Tensor | None, rounding: float) -> bool:
    """Return whether values differ by more than rounding; what is not finite must be so in both."""
    if second is None or first.shape != second.shape:
        return True
    first, second = first.double(), second.double()  # a deterministic site may be bool
    there = first.isfinite()
    if not torch.equal(there, second.isfinite()):
        return True
    first, second = first[there], second[there]
    scale = first.abs().max().clamp(min=LEAST) if first.numel() else 1.0
    return not bool(((first - second).abs() <= rounding * scale).all())
