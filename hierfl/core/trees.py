"""Nested dicts and tuples of tensors: what states, lanes and messages are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

Tree = Any  # nested dicts, tuples, named tuples and lists of tensors

__all__ = [
    "Tree",
    "add",
    "leaves_of",
    "lerp",
    "named_leaves",
    "nbytes",
    "scaled",
    "sub",
    "tree_leaves",
    "tree_map",
    "with_leaves",
    "zeros_like",
]


def add(a: Tree, b: Tree) -> Tree:
    """A + b, leaf by leaf."""
    return tree_map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """A - b, leaf by leaf."""
    return tree_map(torch.sub, a, b)


def scaled(tree: Tree, by: float | Tensor) -> Tree:
    """Multiply every leaf."""
    return tree_map(lambda v: v * by, tree)


def lerp(a: Tree, b: Tree, t: float | Tensor) -> Tree:
    """A + t (b - a), leaf by leaf."""
    return tree_map(lambda u, v: u + t * (v - u), a, b)


def zeros_like(tree: Tree) -> Tree:
    """A tree of zeros."""
    return tree_map(torch.zeros_like, tree)


def leaves_of(tree: Tree) -> Iterator[Tensor]:
    """The same as `tree_leaves`, in the same order, a good deal sooner, for trees of dicts, tuples and lists."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves_of(part)


def nbytes(tree: Tree) -> int:
    """Bytes of all leaves."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def named_leaves(tree: Tree) -> dict[str, Tensor]:
    """Leaves by their path: {"['theta']['weight']": ...}."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]}


def with_leaves(template: Tree, leaves: dict[str, Tensor]) -> Tree:
    """A tree of `template`'s structure with other leaves, by path; the inverse of `named_leaves`."""
    paths, spec = tree_flatten_with_path(template)
    return tree_unflatten([leaves[keystr(path)] for path, _ in paths], spec)
