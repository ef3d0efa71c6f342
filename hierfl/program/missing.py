"""Whether a program handles the missing values of its data: labels that do not count, finite densities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from torch.func import grad_and_value

from hierfl.core.trees import tree_leaves
from hierfl.data.batch import ClientBatch, full_batch, gather, keys_of
from hierfl.data.clients import ClientData
from hierfl.data.consistency import RowsFault
from hierfl.program.few_rows import labeled
from hierfl.program.handlers import log_joint, unchecked, untouched_store
from hierfl.program.labels import holes
from hierfl.program.program import Params, Program
from hierfl.program.sites import Values
from hierfl.program.traces import Center, counts_of, leaves_nan_out

ROWS_AT_ONCE = 4096


def filled(data: ClientData) -> ClientData:
    """Return the data with missing values replaced, field by field, by a complete row."""
    return replace(
        data,
        fields={name: _filled(v) for name, v in data.fields.items()},
        client_fields={name: _filled(v) for name, v in data.client_fields.items()},
    )


def _filled(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values
    whole = values.isfinite().flatten(1).all(1) if values.dim() > 1 else values.isfinite()
    row = values[whole][0] if bool(whole.any()) else torch.zeros_like(values[0])
    return torch.where(whole.view(-1, *[1] * (values.dim() - 1)), values, row)


def not_dealt_with(data: ClientData) -> ValueError:
    """Return the error of data with missing values that the model does not handle."""
    name, bad = next(iter(holes(data).items()))
    row = int(bad.nonzero()[0])
    client = data.names[int(data.row_client[row]) if name in data.fields else row]
    return RowsFault(
        f"field '{name}' has NaN or infinity in {int(bad.sum())} rows, the first of client "
        f"'{client}': fill it (hierfl.fill_missing adds indicators of the missing values), or "
        f"model it, so that no density or gradient is NaN (batch.{name}.nan_to_num() before it is "
        f"used); of a response, mask these rows as well (fn.mask(~batch.{name}.isnan()))",
        f"field '{name}' has NaN or infinity",
    )


def check_missing(program: Program, data: ClientData) -> None:
    """Refuse missing labels that count, and missing values that make a density or gradient NaN."""
    missing = holes(data)
    if missing and not all(
        _is_finite(program, batch) and not _counts_missing(program, batch)
        for batch in _batches(data, missing)
    ):
        raise not_dealt_with(data)


def _counts_missing(program: Program, batch: ClientBatch) -> bool:
    """Return whether a missing label counts, so that predictions would be scored on what fills it."""
    holed = {
        s: n for s, n in program.labels.items() if n in batch.fields and _has_holes(batch.fields[n])
    }
    if not holed:
        return False
    with untouched_store(), unchecked(), Center():
        nodes = poutine.trace(program.model).get_trace(labeled(program, batch)).nodes
    for site, name in holed.items():
        bad, (fn, counts) = ~batch.fields[name].isfinite(), counts_of(nodes[site])
        if leaves_nan_out(fn):
            continue
        bad = bad.flatten(2).any(-1) if bad.dim() > 2 else bad
        if bool((bad if counts is None else bad & (counts > 0.0)).any()):
            return True
    return False


def _batches(data: ClientData, missing: dict[str, Tensor]) -> list[ClientBatch]:
    """Return batches of one client that hold the rows with missing values."""
    of_rows = [bad for name, bad in missing.items() if name in data.fields]
    of_clients = [bad for name, bad in missing.items() if name not in data.fields]
    rows = torch.stack(of_rows).any(0).nonzero()[:, 0] if of_rows else torch.zeros(0).long()
    clients = [int(data.row_client[rows[0]])] if len(rows) else []
    if of_clients:
        clients.extend(torch.stack(of_clients).any(0).nonzero()[:, 0].tolist())
    batches = [full_batch(data, torch.tensor([k])) for k in clients]
    for index in rows.split(ROWS_AT_ONCE) if len(rows) else ():
        owner = data.row_client[index[:1]]
        batches.append(gather(data, owner, index[None], None, keys_of(data, owner, 0, 0)))
    return batches


def _is_finite(program: Program, batch: ClientBatch) -> bool:
    """Return whether a batch's density and its gradient are finite at the start, the guide's too."""
    shared, own = program.start()
    params, batch, latents = {**shared, **own}, labeled(program, batch), program.latents
    blocks = [block for block in (latents.global_block, latents.local_block) if block.sites]

    def density(starts: list[Tensor], params: Params) -> Tensor:
        values: Values = {}
        for block, vector in zip(blocks, starts, strict=True):
            values |= block.unflatten(vector)[0]
        own, common = log_joint(program.model, values, batch, params)
        return own.sum() + common

    holed = {n for n, v in {**batch.fields, **batch.client_fields}.items() if _has_holes(v)}
    with untouched_store(), unchecked(), torch.no_grad():
        at = [block.start for block in blocks]
        every: Any = (0, 1) if at and params else int(not at)
        results = (
            grad_and_value(density, every)(at, params) if at or params else density(at, params)
        )
        if program.reads.guide & holed:
            results = results, grad_and_value(program.loss)(params, batch)
        return all(bool(leaf.isfinite().all()) for leaf in tree_leaves(results))


def _has_holes(values: Tensor) -> bool:
    return values.is_floating_point() and not bool(values.isfinite().all())
