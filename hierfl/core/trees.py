"""Trees: nested dicts, tuples, lists and `tree_class`es of tensors, the form of every state and message."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import torch
from torch import Tensor
from torch.utils._pytree import (
    MappingKey,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

Tree = Any  # nested dicts, tuples, named tuples, lists and `tree_class`es of tensors
T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=False)
def tree_class(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a tree of its fields; a field that is None is no part of it."""
    made = dataclass(frozen=True, eq=False)(kind)
    names = [field.name for field in fields(made)]  # type: ignore[arg-type]

    def parts(value: T) -> tuple[list[Any], list[str]]:
        present = [name for name in names if getattr(value, name) is not None]
        return [getattr(value, name) for name in present], present

    def named_parts(value: T) -> tuple[list[Any], list[str]]:
        values, present = parts(value)
        return list(zip(map(MappingKey, present), values, strict=True)), present

    def value_of(values: Any, present: Any) -> T:
        return made(**dict(zip(present, values, strict=True)))

    register_pytree_node(made, parts, value_of, flatten_with_keys_fn=named_parts)
    return made


def add(a: Tree, b: Tree) -> Tree:
    """Return a + b, leaf by leaf."""
    return tree_map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Return a - b, leaf by leaf."""
    return tree_map(torch.sub, a, b)


def scaled(tree: Tree, by: float | Tensor) -> Tree:
    """Return the tree with every leaf multiplied by `by`."""
    return tree_map(lambda v: v * by, tree)


def lerp(a: Tree, b: Tree, t: float | Tensor) -> Tree:
    """Return a + t (b - a), leaf by leaf."""
    return tree_map(lambda u, v: u + t * (v - u), a, b)


def chosen(flag: Tensor, tree: Tree, other: Tree) -> Tree:
    """Return the first tree where a flag () is above 0, else the second of equal structure."""
    return tree_map(lambda a, b: torch.where(flag > 0.0, a, b), tree, other)


def zeros_like(tree: Tree) -> Tree:
    """Return a tree of zeros with the leaves' shapes and dtypes."""
    return tree_map(torch.zeros_like, tree)


def copied(tree: T) -> T:
    """Return a tree whose tensors share no memory and have no gradient."""
    copy: T = tree_map(lambda v: v.detach().clone(), tree)
    return copy


def leaves_of(tree: Tree) -> Iterator[Tensor]:
    """Yield the leaves in the order of `tree_leaves`, faster, for dicts, tuples and lists."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves_of(part)


def sizes(tree: Tree) -> str:
    """Return how many tensors and numbers a tree holds, in words."""
    leaves = tree_leaves(tree)
    return f"{len(leaves)} tensors, {sum(v.numel() for v in leaves):,} numbers"


def nbytes(tree: Tree) -> int:
    """Return the number of bytes in all tensor leaves together."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def with_rows(tree: Tree, ids: Tensor, rows: Tree) -> Tree:
    """Return the tree with entries `ids` of each leaf's first dimension replaced by `rows`."""
    return tree_map(lambda old, new: old.index_copy(0, ids, new.to(old.dtype)), tree, rows)


def as_vector(tree: Tree) -> Tensor:
    """Return all entries of a tree of tensors as one vector (d,), in the order of `tree_leaves`."""
    return torch.cat([leaf.reshape(-1) for leaf in tree_leaves(tree)])


def as_tree(vector: Tensor, like: Tree) -> Tree:
    """Return a tree of the structure and shapes of `like`: the inverse of `as_vector`."""
    leaves, spec = tree_flatten(like)
    pieces = vector.split([leaf.numel() for leaf in leaves])
    shaped = [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True)]
    return tree_unflatten(shaped, spec)


def named_leaves(tree: Tree) -> dict[str, Tensor]:
    """Return the leaves by their paths, such as {"['theta']['weight']": ...}."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]}


def with_leaves(template: Tree, leaves: dict[str, Tensor]) -> Tree:
    """Return a tree of `template`'s structure from its `named_leaves`."""
    paths, spec = tree_flatten_with_path(template)
    return tree_unflatten([leaves[keystr(path)] for path, _ in paths], spec)


DTYPES = {8: torch.int8, 16: torch.int16}


class Rounded(NamedTuple):
    """A tensor as it is sent: int8 or int16 numbers times a scale, () or (C,)."""

    numbers: Tensor
    scale: Tensor


def rounded(tree: Tree, bits: int) -> Tree:
    """Return a tree with its floating-point tensors as `Rounded`; those it would not shrink stay.

        scale = max |v| / m,    numbers = round(v / scale), halves to even,    m = 2^(bits - 1) - 1

    No number is off by more than scale / 2; the scale of a tensor that is not finite is not finite.
    """
    return tree_map(lambda v: _rounded(v, bits), tree)


def _rounded(value: Tensor, bits: int) -> Tensor | Rounded:
    small = value.numel() * bits // 8 + value.itemsize
    if not value.is_floating_point() or small >= value.numel() * value.itemsize:
        return value
    largest = 2 ** (bits - 1) - 1
    scale = value.abs().amax() / largest
    in_units = value / torch.where(scale == 0.0, 1.0, scale)
    return Rounded(in_units.round().clamp(-largest, largest).to(DTYPES[bits]), scale)


def restored(tree: Tree) -> Tree:
    """Return a tree with plain tensors in the places of `Rounded` ones."""
    return tree_map(_restored, tree, is_leaf=_is_rounded)


def _restored(value: Tensor | Rounded) -> Tensor:
    if isinstance(value, Tensor):
        return value
    numbers, scale = value
    ones = (1,) * (numbers.dim() - scale.dim())
    return numbers.to(scale.dtype) * scale.reshape(*scale.shape, *ones)


def times(tree: Tree, by: Tensor) -> Tree:
    """Return the tree with every tensor multiplied by `by`, (); of a `Rounded` one the scale is."""

    def multiplied(v: Tensor | Rounded) -> Tensor | Rounded:
        return v * by if isinstance(v, Tensor) else Rounded(v[0], v[1] * by)

    return tree_map(multiplied, tree, is_leaf=_is_rounded)


def has_rounded(tree: Tree) -> bool:
    """Return whether any tensor of a tree is `Rounded`."""
    return any(isinstance(v, Rounded) for v in tree_leaves(tree, is_leaf=_is_rounded))


def _is_rounded(value: object) -> bool:
    return isinstance(value, Rounded)
