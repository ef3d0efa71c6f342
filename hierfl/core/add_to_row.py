"""Add a vector to one row of a matrix, in place in compiled steps (`engine.graph_rewrites`)."""

from typing import Any

import torch
from torch import Tensor


def add_(rows: Tensor, vector: Tensor, at: Tensor) -> None:
    """Add vectors (..., d) in place to rows `at` (...) of (..., l, d), if 0 <= at < l."""
    length, width = rows.shape[-2:]
    flat, vectors, row = rows.view(-1, width), vector.reshape(-1, width), at.reshape(-1)
    index, there = torch.arange(len(row)) * length + row.long(), (row >= 0) & (row < length)
    if not bool(there.all()):
        index, vectors = index[there], vectors[there]
    flat.index_add_(0, index, vectors)


@torch.library.custom_op("hierfl::add_to_row", mutates_args=())
def add_to_row(rows: Tensor, vector: Tensor, at: Tensor) -> Tensor:
    """Return rows (..., l, d) with vectors (..., d) added to row `at` (...), if 0 <= at < l."""
    new = rows.clone(memory_format=torch.contiguous_format)
    add_(new, vector, at)
    return new


@add_to_row.register_fake
def _(rows: Tensor, vector: Tensor, at: Tensor) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


@add_to_row.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, ...], rows: Tensor, vector: Tensor, at: Tensor
) -> tuple[Tensor, int]:
    def in_front(value: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return value.expand(info.batch_size, *value.shape)
        return (
            value if dim == 0 else value.movedim(dim, 0)
        )  # without a view, which would hide the tensor

    each = (in_front(value, dim) for value, dim in zip((rows, vector, at), in_dims, strict=True))
    return add_to_row(*each), 0
