"""A function of one client as a function of many: under `torch.vmap`, or one client after another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch, lanes_of, one_lane


def over_clients(one: Callable[..., Tree], at_once: bool) -> Callable[..., Tree]:
    """A function of one client's trees as a function of trees with the clients in front."""

    def run(*trees: Tree, count: int) -> Tree:
        if at_once:
            index = torch.arange(count)  # so that there is always something to map over
            return torch.vmap(lambda _, *t: _tensors(one(*t)))(index, *trees)
        each = [one(*(tree_map(lambda v, i=i: v[i], t) for t in trees)) for i in range(count)]
        return tree_map(lambda *v: torch.stack(v), *each)

    return run


def over_batch(one: Callable[[Tree, ClientBatch], Tree], at_once: bool) -> Callable[[Tree, ClientBatch], Tree]:
    """A function of one client's lane and batch as a function of lanes and a batch with the clients in front."""

    def run(lane: Tree, batch: ClientBatch) -> Tree:
        rows, shared = lanes_of(batch)
        return over_clients(lambda lane, row: one(lane, one_lane(row, shared, batch)), at_once)(
            lane, rows, count=batch.num_clients
        )

    return run


def _tensors(tree: Tree) -> Tree:
    return tree_map(lambda v: v if isinstance(v, Tensor) else torch.as_tensor(v), tree)


def where_working(on: Tensor, new: Tree, old: Tree) -> Tree:
    """The new lanes of clients that still work (C,), the old ones of those that rest."""
    return tree_map(lambda n, o: torch.where(on.view(-1, *[1] * (n.dim() - 1)), n, o), new, old)
