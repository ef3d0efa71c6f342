"""The rows a client works on at each local step: passes over its rows, shuffled by its key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch, full_batch, keys_of
from hierfl.data.clients import ClientData
from hierfl.method import Phase

Rows = tuple[dict[str, Tensor], dict[str, Tensor]]  # fields (C B, ...); {"rows": mask (C, B)} or {}
Active = tuple[Tensor, ...]  # (which clients still work (C,),), or () where all do


def steps(
    data: ClientData, ids: Tensor, phase: Phase, *, seed: int, at: tuple[int, ...]
) -> Iterator[tuple[Tree, Active]]:
    """Yield the tensors of each local step of a phase; `batch_of` makes a batch of them.

    A step costs as few operations as possible here: the clients' dimension of the fields is unflattened by
    `batch_of` alone, which a compiled step has in its graph.

    Args:
        data: the federation.
        ids: (C,) int64, the clients of a chunk.
        phase: how many steps or epochs, and rows a batch.
        seed: of the run.
        at: round and phase; with the number of the step they make the keys of its noise.

    Yields:
        The step's tensors, and which clients still work: (mask (C,) bool,), or () where all do.
    """
    if phase.batch_size is None:
        rows, active = _all_rows(data, ids, phase.count)
    else:
        rows, active = _mini_batches(data, ids, phase, seed=seed, at=at)
    fixed = {
        "client_fields": {
            name: values[ids][:, None] for name, values in data.client_fields.items()
        },
        "counts": data.counts[ids].to(torch.get_default_dtype()),
    }
    keys = keys_of(data, ids, seed, *at).of_steps(len(active))
    for (fields, mask), working, (own, root) in zip(rows, active, keys, strict=True):
        yield {**fixed, "fields": fields, "rows": mask, "keys": own, "root": root}, working


def batch_of(tensors: Tree, phase: Phase) -> ClientBatch:
    """Return the batch of a step's tensors, as `steps` yields them."""
    clients = len(tensors["counts"])
    return ClientBatch(
        fields={
            name: values.unflatten(0, (clients, -1)) for name, values in tensors["fields"].items()
        },
        client_fields=tensors["client_fields"],
        rows=tensors["rows"].get("rows"),
        counts=tensors["counts"],
        own_keys=tensors["keys"],
        root=tensors["root"],
        is_mini_batch=phase.batch_size is not None,
    )


def _all_rows(data: ClientData, ids: Tensor, count: int) -> tuple[Iterable[Rows], list[Active]]:
    """Return all rows of the clients, gathered once, for each of `count` steps."""
    whole = full_batch(data, ids)
    fields = {name: values.flatten(0, 1) for name, values in whole.fields.items()}
    mask = {} if whole.rows is None else {"rows": whole.rows}
    return repeat((fields, mask), count), [()] * count


def _mini_batches(
    data: ClientData, ids: Tensor, phase: Phase, *, seed: int, at: tuple[int, ...]
) -> tuple[Iterable[Rows], list[Active]]:
    """Return the rows of each step, gathered when they are asked for."""
    index, inside, active = row_plan(data, ids, phase, seed=seed, at=at)
    is_full, all_work = bool(inside.all()), bool(active.all())
    masks = repeat({}, len(index)) if is_full else ({"rows": mask} for mask in inside.unbind())
    # index_select copies row by row: a third of the time of values[rows]
    fields = (
        {name: values.index_select(0, rows) for name, values in data.fields.items()}
        for rows in index.flatten(1).unbind()
    )
    working: list[Active] = [()] * len(index) if all_work else [(on,) for on in active.unbind()]
    return zip(fields, masks, strict=True), working


def row_plan(
    data: ClientData, ids: Tensor, phase: Phase, *, seed: int, at: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the rows of every step of a phase on mini-batches.

    In "step" units a pass drops its last, smaller batch, so that batches are equal and need no mask; as every
    pass is reshuffled, the dropped rows come up in other passes. In "epoch" units the smaller batch is kept,
    and clients with fewer rows stop earlier. A client with fewer rows than a batch works on all of them.

    Args:
        data: the federation.
        ids: (C,) int64, the clients of a chunk.
        phase: how many steps or epochs, and rows a batch.
        seed: of the run.
        at: round and phase, which key the order of rows.

    Returns:
        For K steps of B rows: the rows' positions in the data (K, C, B) int64; which of them are not padding
        (K, C, B) bool; which clients still work (K, C) bool.

    Raises:
        ValueError: the phase works on all rows.
    """
    if phase.batch_size is None:
        raise ValueError("a phase on all rows has no row plan")
    counts = data.counts[ids]
    size = min(phase.batch_size, int(counts.max()))
    by_epoch = phase.unit == "epoch"
    # batches a pass, (C,)
    passes = (counts + size - 1) // size if by_epoch else (counts // size).clamp(min=1)
    k = torch.arange(int((passes * phase.count).max()) if by_epoch else phase.count)
    epoch, part = k[:, None] // passes, k[:, None] % passes  # (K, C)
    active = epoch < phase.count if by_epoch else torch.ones_like(epoch, dtype=torch.bool)
    if by_epoch:  # a client that is done early needs no orders of further epochs
        epoch = epoch.clamp(max=phase.count - 1)
    keys = noise.fold_now(data.keys[ids], seed, seed >> 32, noise.word("rows"), *at)
    orders = _orders(keys, counts, int(epoch.max()) + 1 if len(k) else 0)
    place = part[..., None] * size + torch.arange(size)  # (K, C, B)
    inside = place < counts[:, None]
    client = torch.arange(len(ids))[None, :, None]
    within = orders[epoch[..., None], client, torch.where(inside, place, 0)]
    return data.offsets[ids][:, None] + torch.where(inside, within, 0), inside, active


def _orders(keys: Tensor, counts: Tensor, epochs: int) -> Tensor:
    """Return the order of each client's rows in each epoch, (epochs, C, largest count) int64."""
    width = int(counts.max())
    shuffled = [
        noise.permutations(noise.fold_now(keys, epoch), counts, width) for epoch in range(epochs)
    ]
    return (
        torch.stack(shuffled) if shuffled else torch.zeros(0, len(counts), width, dtype=torch.long)
    )
