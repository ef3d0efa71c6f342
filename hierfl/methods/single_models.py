"""A server's models of single clients, one each, and how they compare."""

from __future__ import annotations

import torch
from torch import Tensor

from hierfl.core.trees import Tree, tree_leaves, tree_map
from hierfl.method import Reports


def at_each(value: Tree, clients: int) -> Tree:
    """Return a tree for each of N clients, all equal: N in front of every leaf."""
    return tree_map(lambda v: v.expand(clients, *v.shape).clone(), value)


def stored(before: Tree, reports: Reports) -> Tree:
    """Return the trees of all clients (N, ...), with those of a round's cohort replaced."""

    def put(old: Tensor, new: Tensor) -> Tensor:
        return old.index_copy(0, reports.ids, new.to(old.dtype))

    return tree_map(put, before, reports.value)


def mean_of(models: Tree, seen: Tensor) -> Tree:
    """Return the mean of the models of clients that were seen, (N,) bool, or of all if none was."""
    share = torch.where(seen.any(), seen, torch.ones_like(seen)).double()
    share = share / share.sum()
    return tree_map(lambda v: torch.tensordot(share.to(v.dtype), v, 1), models)


def flat(models: Tree) -> Tensor:
    """Return each client's params as one vector, (N, P)."""
    return torch.cat([v.flatten(1) for v in tree_leaves(models)], 1)


def distances(vectors: Tensor) -> Tensor:
    """Return the squared distances of vectors (N, P), (N, N)."""
    # by differences: the expanded square loses all digits where models are similar and large
    count = len(vectors)
    apart = torch.zeros(count, count, dtype=vectors.dtype)
    one, other = torch.triu_indices(count, count, offset=1)
    apart[one, other] = torch.pdist(vectors).square()
    return apart + apart.T
