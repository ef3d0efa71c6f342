"""Gradients of a density at many points: torch's operations recorded once, and their work counted.

A Pyro program under `torch.vmap` costs milliseconds of Python a call, whatever it computes. Its
operations alone, with those of the derivative, take about a fifth in TorchScript.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Function = Callable[..., tuple[Tensor, Tensor]]

EXACT = 1e-9  # relative difference of recorded operations from the function that is rounding
AWAY = 0.1  # at points that differ by so much
# seconds of a core for an operation in TorchScript, for one by Python, and for a scalar of it
BY_SCRIPT, BY_PYTHON, A_SCALAR = 1.5e-6, 1.5e-5, 7e-10
WHOLE_ROWS = ("mm", "linalg", "cholesky", "triangular", "_inv")  # names of matrix operations
ROW_SHARE = 0.25  # of a row's scalars that one of theirs is worth


class WorkCounter(TorchDispatchMode):
    """Counts operations of torch while it is entered, and the scalars that they compute: the same on every machine."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.scalars = 0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [v for v in tree_leaves(result) if isinstance(v, Tensor)]
        each = 1.0
        if any(word in func.__name__ for word in WHOLE_ROWS) and args[0].dim():
            each = max(1.0, ROW_SHARE * args[0].shape[-1])
        self.operations += 1
        self.scalars += each * sum(v.numel() for v in tensors)
        return result

    def seconds(self, *, recorded: bool) -> float:
        """Return about how long the work takes a core of 2023."""
        return (BY_SCRIPT if recorded else BY_PYTHON) * self.operations + A_SCALAR * self.scalars


class Gradient:
    """The gradient of a pure function of points (S, K) and other tensors that returns values (S,)."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.recorded = dict[tuple[torch.Size, ...], Function]()

    def __call__(self, x: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (S,) and gradients in x (S, K); the first call of a shape records it."""
        shapes = tuple(v.shape for v in (x, *inputs))
        if shapes not in self.recorded:
            self.recorded[shapes] = _recorded(self.eager, x, *inputs) or self.eager
        return self.recorded[shapes](x, *inputs)

    def eager(self, x: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same by the function itself."""
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            value = self.function(x, *inputs)
            (slope,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), slope

    def seconds(self, x: Tensor, *inputs: Tensor) -> float:
        """Return about how long a call takes, by its counted work."""
        self(x, *inputs)
        with WorkCounter() as counter:
            self.eager(x, *inputs)
        run = self.recorded[tuple(v.shape for v in (x, *inputs))]
        return counter.seconds(recorded=run != self.eager)


def _recorded(function: Function, x: Tensor, *inputs: Tensor) -> Function | None:
    """Return a function's operations in TorchScript; None where its values decide them."""
    try:
        with warnings.catch_warnings():
            # TorchScript is deprecated, and has no successor as fast
            warnings.simplefilter("ignore")
            graph = make_fx(function)(x, *inputs)
            graph.graph.eliminate_dead_code()
            graph.recompile()
            run: Any = torch.jit.trace(graph, (x, *inputs), check_trace=False)
            away = x + AWAY
            same = zip(run(away, *inputs), function(away, *inputs), strict=True)
    except Exception:  # recording fails in many ways; the function itself is right, and slower
        return None
    if not all(torch.allclose(a, b, rtol=EXACT, atol=EXACT, equal_nan=True) for a, b in same):
        return None
    script: Function = run
    return script
