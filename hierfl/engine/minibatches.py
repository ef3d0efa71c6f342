"""Which rows a client works on at each local step: passes over its rows, reshuffled, as a function of its key."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch, full_batch, keys_of
from hierfl.data.clients import ClientData
from hierfl.method import Phase


def batches(
    data: ClientData, ids: Tensor, phase: Phase, *, seed: int, at: tuple[int, ...]
) -> Iterator[tuple[ClientBatch, Tensor | None]]:
    """The batches of a phase, step by step, each with the clients (C,) that still have work (None: all of them).

    Args:
        data: the federation.
        ids: (C,) the cohort, or a chunk of it.
        phase: how many steps or epochs, and rows a batch.
        seed: of the run.
        at: round and phase; the step is appended, and keys the noise and the order of rows.
    """
    for parts, active in steps(data, ids, phase, seed=seed, at=at):
        yield batch_of(parts, phase), active


def batch_of(parts: Tree, phase: Phase) -> ClientBatch:
    """The batch that a step's tensors make."""
    clients = len(parts["counts"])
    return ClientBatch(
        fields={
            name: values.unflatten(0, (clients, -1)) for name, values in parts["fields"].items()
        },
        client_fields=parts["client_fields"],
        rows=parts["rows"].get("rows"),
        counts=parts["counts"],
        own_keys=parts["keys"],
        root=parts["root"],
        is_mini_batch=phase.batch_size is not None,
    )


def steps(
    data: ClientData, ids: Tensor, phase: Phase, *, seed: int, at: tuple[int, ...]
) -> Iterator[tuple[Tree, Tensor | None]]:
    """What the batches of a phase are made of, as few operations a step as can be: fields (C B, ...) are not yet taken apart."""
    counts = data.counts[ids].to(torch.get_default_dtype())
    parts = {
        "client_fields": {
            name: values[ids][:, None] for name, values in data.client_fields.items()
        },
        "counts": counts,
    }
    keys = keys_of(data, ids, seed, *at)
    if phase.batch_size is None:
        whole = full_batch(data, ids)
        parts |= {
            "fields": {name: values.flatten(0, 1) for name, values in whole.fields.items()},
            "rows": {},
        }
        if whole.rows is not None:
            parts["rows"] = {"rows": whole.rows}
        for own, root in keys.of_steps(phase.count):
            yield {**parts, "keys": own, "root": root}, None
        return
    index, inside, active = row_plan(data, ids, phase, seed=seed, at=at)
    masks = None if bool(inside.all()) else inside.unbind()
    working = None if bool(active.all()) else active.unbind()
    for k, (rows, (own, root)) in enumerate(
        zip(index.flatten(1).unbind(), keys.of_steps(len(index)), strict=True)
    ):
        # index_select copies row by row: a third of the time of values[index]
        fields = {name: values.index_select(0, rows) for name, values in data.fields.items()}
        mask = {} if masks is None else {"rows": masks[k]}
        yield (
            {**parts, "fields": fields, "rows": mask, "keys": own, "root": root},
            None if working is None else working[k],
        )


def row_plan(
    data: ClientData, ids: Tensor, phase: Phase, *, seed: int, at: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of every step: (index (K, C, B), which are no padding (K, C, B), which clients still work (K, C)).

    In "step" units a pass drops its last, smaller batch (its rows come first or last in the next, reshuffled, pass), so that
    batches are equal and need no mask; in "epoch" units the smaller batch is kept, and clients with fewer rows stop earlier.
    A client with fewer rows than a batch works on all of them.
    """
    if phase.batch_size is None:
        raise ValueError("a phase on all rows has no row plan")
    counts = data.counts[ids]
    size = min(phase.batch_size, int(counts.max()))
    by_epoch = phase.unit == "epoch"
    passes = (
        (counts + size - 1) // size if by_epoch else (counts // size).clamp(min=1)
    )  # batches a pass, (C,)
    steps = int((passes * phase.count).max()) if by_epoch else phase.count
    k = torch.arange(steps)
    epoch, part = k[:, None] // passes, k[:, None] % passes  # (K, C)
    active = epoch < phase.count if by_epoch else torch.ones_like(epoch, dtype=torch.bool)
    if by_epoch:
        epoch = epoch.clamp(
            max=phase.count - 1
        )  # a small client that is done is not shuffled on and on
    keys = noise.fold_now(data.keys[ids], seed, seed >> 32, noise.word("rows"), *at)
    width = int(counts.max())
    shuffled = [
        noise.permutations(noise.fold_now(keys, e), counts, width)
        for e in range(int(epoch.max()) + 1 if steps else 0)
    ]
    orders = (
        torch.stack(shuffled) if shuffled else torch.zeros(0, len(ids), width, dtype=torch.long)
    )
    place = part[..., None] * size + torch.arange(size)  # (K, C, B)
    inside = place < counts[:, None]
    lane = torch.arange(len(ids))[None, :, None]
    within = orders[epoch[..., None], lane, torch.where(inside, place, 0)]
    return data.offsets[ids][:, None] + torch.where(inside, within, 0), inside, active
