"""Tensors in 8 or 16 bits a number: whole numbers, and one scale for each tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.trees import Tree, tree_leaves, tree_map

DTYPES = {8: torch.int8, 16: torch.int16}


class Rounded(NamedTuple):
    """A tensor as it is sent: int8 or int16 numbers times a scale, () or (C,)."""

    numbers: Tensor
    scale: Tensor


def rounded(tree: Tree, bits: int) -> Tree:
    """Return a tree with its floating-point tensors as `Rounded`, all by one rule.

        scale = max |v| / m,    numbers = round(v / scale),    m = 2^(bits - 1) - 1

    Halves are rounded to the even number. No number is off by more than scale / 2. Of a tensor that
    is not finite, neither is the scale. Tensors that would not become smaller, such as single
    numbers, stay as they are.
    """
    return tree_map(lambda v: _rounded(v, bits), tree)


def _rounded(value: Tensor, bits: int) -> Tensor | Rounded:
    small = value.numel() * bits // 8 + value.itemsize
    if not value.is_floating_point() or small >= value.numel() * value.itemsize:
        return value
    most = 2 ** (bits - 1) - 1
    scale = value.abs().amax() / most
    in_units = value / torch.where(scale == 0.0, 1.0, scale)
    return Rounded(in_units.round().clamp(-most, most).to(DTYPES[bits]), scale)


def restored(tree: Tree) -> Tree:
    """Return a tree with plain tensors in the places of `Rounded` ones."""
    return _over(_restored, tree)


def _restored(value: Tensor | Rounded) -> Tensor:
    if isinstance(value, Tensor):
        return value
    numbers, scale = value
    ones = (1,) * (numbers.dim() - scale.dim())
    return numbers.to(scale.dtype) * scale.reshape(*scale.shape, *ones)


def times(tree: Tree, by: Tensor) -> Tree:
    """Return the tree with every tensor multiplied by `by`, (); of a `Rounded` one the scale is."""
    return _over(lambda v: v * by if isinstance(v, Tensor) else Rounded(v[0], v[1] * by), tree)


def has_rounded(tree: Tree) -> bool:
    """Return whether any tensor of a tree is `Rounded`."""
    return any(isinstance(v, Rounded) for v in tree_leaves(tree, is_leaf=_is_rounded))


def _over(function: Callable[[Tensor | Rounded], Tree], tree: Tree) -> Tree:
    return tree_map(function, tree, is_leaf=_is_rounded)


def _is_rounded(value: object) -> bool:
    return isinstance(value, Rounded)
