"""Two operations of a log likelihood whose repeated derivatives stay cheap under `torch.vmap`.

`times` is a product with a matrix that no derivative is taken of. Under `torch.vmap` torch copies a
matrix that all points share once per point, and then once per direction of a derivative. With rows
x points x directions, those copies are most of the work.

`softplus` is log(1 + e^x). Its n-th derivative is a polynomial in the logistic function, evaluated
in one step. Reverse mode over reverse mode, nested four deep, takes hundreds.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.polynomial import Polynomial
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


class _Times(torch.autograd.Function):
    """The product v T of v (*lead, n) and T (*lead, n, m), whose shared leading dims are 1."""

    @staticmethod
    def forward(v: Tensor, matrix: Tensor) -> Tensor:
        lead, shared = v.shape[:-1], matrix.shape[:-2]
        own = max((d + 1 for d, size in enumerate(shared) if size != 1), default=0)
        flat = v.reshape(*lead[:own], -1, v.shape[-1]) @ matrix.reshape(
            *shared[:own], *matrix.shape[-2:]
        )
        return flat.reshape(*lead, matrix.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (matrix,) = ctx.saved_tensors
        return _times(grads[0], matrix.mT), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None], v: Tensor, matrix: Tensor
    ) -> tuple[Tensor, int]:
        v_dim, matrix_dim = in_dims
        v = v.expand(info.batch_size, *v.shape) if v_dim is None else v.movedim(v_dim, 0)
        matrix = matrix[None] if matrix_dim is None else matrix.movedim(matrix_dim, 0)
        # Other maps have given v dims that the matrix lacks: there the matrix is shared.
        if matrix.dim() != v.dim() + 1:
            matrix = matrix.reshape(
                matrix.shape[0], *[1] * (v.dim() + 1 - matrix.dim()), *matrix.shape[1:]
            )
        return _times(v, matrix), 0


_times: Any = _Times.apply


def times(v: Tensor, matrix: Tensor) -> Tensor:
    """Return v @ matrix (m,) for v (n,) and matrix (n, m), which takes no derivative."""
    return _times(v, matrix.detach())


class _Logistic(torch.autograd.Function):
    """The derivative of log(1 + e^x) of an order >= 1: a polynomial in the logistic function."""

    @staticmethod
    def forward(x: Tensor, order: int) -> Tensor:
        s = torch.sigmoid(x)
        polynomial, step = Polynomial([0.0, 1.0]), Polynomial([0.0, 1.0, -1.0])  # ds/dx = s - s^2
        for _ in range(order - 1):
            polynomial = polynomial.deriv() * step
        *lower, highest = (float(c) for c in polynomial.coef)
        total = torch.full_like(s, highest)
        for c in reversed(lower):
            total = total * s + c
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.order = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grads[0] * _logistic(x, ctx.order + 1), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, None], x: Tensor, order: int
    ) -> tuple[Any, int | None]:
        return _logistic(x, order), in_dims[0]


_logistic: Any = _Logistic.apply


class _Softplus(torch.autograd.Function):
    """The function log(1 + e^x), whose derivatives are those of `_Logistic`."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.nn.functional.softplus(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * _logistic(x, 1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Any, int | None]:
        return _softplus(x), in_dims[0]


_softplus: Any = _Softplus.apply


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x), entry by entry."""
    if has_torch_function((x,)):  # a mode that records torch's functions takes this for one of them
        return handle_torch_function(softplus, (x,), x)
    return _softplus(x)
