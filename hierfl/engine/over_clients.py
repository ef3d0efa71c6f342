"""A function of one client as a function of many: under `torch.vmap`, or one client after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch


def over_clients(one: Callable[..., Tree], at_once: bool) -> Callable[..., Tree]:
    """A function of one client's trees as a function of trees with the clients in front."""

    def run(*trees: Tree, count: int) -> Tree:
        if at_once:
            index = torch.arange(count)  # so that there is always something to map over
            return torch.vmap(lambda _, *t: _tensors(one(*t)))(index, *trees)
        each = [one(*(tree_map(lambda v, i=i: v[i], t) for t in trees)) for i in range(count)]
        return tree_map(lambda *v: torch.stack(v), *each)

    return run


def over_batch(
    one: Callable[[Tree, ClientBatch], Tree], at_once: bool
) -> Callable[[Tree, ClientBatch], Tree]:
    """A function of one client's lane and batch as a function of lanes and a batch with the clients in front."""

    def run(lane: Tree, batch: ClientBatch) -> Tree:
        rows, shared = slots_of(batch)
        return over_clients(lambda lane, row: one(lane, one_slot(row, shared, batch)), at_once)(
            lane, rows, count=batch.num_clients
        )

    return run


def _tensors(tree: Tree) -> Tree:
    return tree_map(lambda v: v if isinstance(v, Tensor) else torch.as_tensor(v), tree)


def where_working(on: Tensor, new: Tree, old: Tree) -> Tree:
    """The new lanes of clients that still work (C,), the old ones of those that rest."""
    return tree_map(lambda n, o: torch.where(on.view(-1, *[1] * (n.dim() - 1)), n, o), new, old)


def slots_of(batch: ClientBatch) -> tuple[Tree, Tree]:
    """A batch of C clients as C batches of one: tensors with the clients in front (for vmap), and what they share."""
    lanes = {
        "fields": {name: values[:, None] for name, values in batch.fields.items()},
        "client_fields": {name: values[:, None] for name, values in batch.client_fields.items()},
        "rows": {} if batch.rows is None else {"rows": batch.rows[:, None]},
        "counts": batch.counts[:, None],
        "keys": batch.own_keys[:, None],
    }
    return lanes, {
        "root": batch.root,
        "words": tuple(torch.as_tensor(w, dtype=torch.int32) for w in batch.words),
    }


def one_slot(lane: Tree, shared: Tree, like: ClientBatch) -> ClientBatch:
    """The batch of one client that a lane of `slots_of` stands for."""
    return replace(
        like,
        fields=lane["fields"],
        client_fields=lane["client_fields"],
        rows=lane["rows"].get("rows"),
        counts=lane["counts"],
        own_keys=lane["keys"],
        **shared,
    )
