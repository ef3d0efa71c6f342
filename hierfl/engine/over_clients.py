"""Functions of one client turned into functions of many: under `torch.vmap`, or in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch


def over_clients(one: Callable[..., Tree], at_once: bool) -> Callable[..., Tree]:
    """Return a function of one client's trees as one of trees with `count` clients in front."""

    def run(*trees: Tree, count: int) -> Tree:
        if at_once:
            index = torch.arange(count)  # vmap needs a tensor to map over; trees may have none
            return torch.vmap(lambda _, *t: tree_map(_tensor, one(*t)))(index, *trees)
        each = [one(*(tree_map(lambda v, i=i: v[i], t) for t in trees)) for i in range(count)]
        return tree_map(lambda *v: torch.stack(v), *each)

    return run


def over_batch(
    one: Callable[[Tree, ClientBatch], Tree], at_once: bool
) -> Callable[[Tree, ClientBatch], Tree]:
    """Return a function (work, batch) -> work of one client as one of C clients."""

    def run(work: Tree, batch: ClientBatch) -> Tree:
        slots, shared = slots_of(batch)
        return over_clients(lambda work, slot: one(work, one_slot(slot, shared, batch)), at_once)(
            work, slots, count=batch.num_clients
        )

    return run


def _tensor(value: object) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def where_working(on: Tensor, new: Tree, old: Tree) -> Tree:
    """Return the new working states where `on` (C,) is true, and the old ones elsewhere."""
    return tree_map(lambda n, o: torch.where(on.view(-1, *[1] * (n.dim() - 1)), n, o), new, old)


def slots_of(batch: ClientBatch) -> tuple[Tree, Tree]:
    """Split a batch of C clients into slots (C, 1, ...), to be mapped over, and what they share."""
    slots = {
        "fields": {name: values[:, None] for name, values in batch.fields.items()},
        "client_fields": {name: values[:, None] for name, values in batch.client_fields.items()},
        "rows": {} if batch.rows is None else {"rows": batch.rows[:, None]},
        "counts": batch.counts[:, None],
        "keys": batch.own_keys[:, None],
    }
    return slots, {
        "root": batch.root,
        "words": tuple(torch.as_tensor(w, dtype=torch.int32) for w in batch.words),
    }


def one_slot(slot: Tree, shared: Tree, like: ClientBatch) -> ClientBatch:
    """Return the batch of one client from the trees of `slots_of`, as `like` was split."""
    return replace(
        like,
        fields=slot["fields"],
        client_fields=slot["client_fields"],
        rows=slot["rows"].get("rows"),
        counts=slot["counts"],
        own_keys=slot["keys"],
        **shared,
    )
