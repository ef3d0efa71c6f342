"""Sums of products in log space, a backend of opt_einsum that `torch.func` can differentiate twice and map."""

from __future__ import annotations

import torch
from pyro.ops.einsum.torch_log import transpose
from pyro.ops.einsum.util import Tensordot
from torch import Tensor

__all__ = ["einsum", "tensordot", "transpose"]


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Return log sum exp of sums of tensors; where all terms are -inf, the log of the smallest float."""
    inputs, output = equation.split("->")
    if inputs == output:
        return operands[0].clone()
    shifted, shift = [], torch.zeros((), dtype=operands[0].dtype)
    for dims, operand in zip(inputs.split(","), operands, strict=True):
        largest = operand.detach()
        for axis, dim in enumerate(dims):
            if dim not in output:
                largest = largest.amax(axis, keepdim=True)
        largest = largest.clamp(min=torch.finfo(largest.dtype).min)  # -inf less -inf is no number
        shifted.append((operand - largest).exp())
        held = "".join(dim for dim in dims if dim in output)
        shift = shift + _aligned(largest.reshape(_sizes(operand, dims, held)), held, output)
    total = torch.einsum(equation, *shifted)
    tiny = torch.finfo(total.dtype).tiny
    # Pyro's safe_log is an autograd.Function, which torch.func refuses
    return shift + torch.where(total > 0.0, total, tiny).log()


def _sizes(operand: Tensor, dims: str, held: str) -> list[int]:
    return [size for dim, size in zip(dims, operand.shape, strict=True) if dim in held]


def _aligned(value: Tensor, dims: str, output: str) -> Tensor:
    """Return a tensor with its dimensions in the order of the output's, size 1 where it has none."""
    order = [dims.index(dim) for dim in output if dim in dims]
    places = iter(value.permute(order).shape)
    return value.permute(order).reshape([next(places) if dim in dims else 1 for dim in output])


tensordot = Tensordot(einsum)
