"""Gradients of a density at many points: torch's operations recorded once, and their work counted.

A Pyro program under `torch.vmap` costs milliseconds of Python a call, whatever it computes. Its
operations alone, with those of the derivative, take about a fifth in TorchScript.
"""

import warnings
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from hierfl.core.graphs import Operation, Value, passed_on, repeated, simplified
from hierfl.core.process import EagerMode

Function = Callable[..., tuple[Tensor, Tensor]]

EXACT = 1e-9  # relative difference of recorded operations from the function that is rounding
AWAY = 0.1  # at points that differ by so much
# seconds of a core for an operation in TorchScript, for one by Python, and for a scalar of it
BY_SCRIPT, BY_PYTHON, A_SCALAR = 1.5e-6, 1.5e-5, 7e-10
WHOLE_ROWS = ("mm.", "linalg", "cholesky", "triangular", "_inv")  # names of matrix operations
ROW_SHARE = 0.25  # of a row's scalars that one of theirs is worth
# what returns its argument, now that derivatives are taken: outside of a tape `detach` stops them
COPIES = frozenset("detach alias lift_fresh _to_copy".split())
# entries of rows whose sums take torch ten times as long as additions of columns, if there are many
FEW_ENTRIES, FEW_SCALARS = (2, 3), 1000
FEW = 500  # calls of a graph that take less than passes over it, which make each a tenth faster


def sum_of_few(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """Return what `torch.sum` does over a last dimension of few entries."""
    first, *others = x.split(1, -1)
    total = sum(others, first)
    return total if keepdim else total.squeeze(-1)


class WorkCounter(EagerMode):
    """Counts operations of torch while it is entered, and the scalars that they compute: the same on every machine."""

    def __init__(self) -> None:
        super().__init__()
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

    def is_of_scalars(self, times: float) -> bool:
        """Return whether scalars of so many times the work take longer than its operations in TorchScript."""
        return A_SCALAR * self.scalars * times > BY_SCRIPT * self.operations


class _Tape(WorkCounter):
    """Notes the operations of a function, those of its derivative too, for `make_fx` takes ten times as long."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[Operation] = []
        self.looks: list[bool] = []  # of what looks at values: whether these depend on the inputs
        self.changes = False  # whether a tensor is changed in place, as others may see
        self.numbers = WeakTensorKeyDictionary({v: i for i, v in enumerate(inputs)})
        # number of what a call returned unchanged -> its argument's
        self.passed = dict[int | None, int]()
        self.depend = set(range(len(inputs)))  # numbers of tensors that depend on the inputs
        self.count = len(inputs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        values = [
            Value(self.numbers[v]) if isinstance(v, Tensor) and v in self.numbers else v
            for v in leaves
        ]
        depends = any(isinstance(v, Value) and v.number in self.depend for v in values)
        if torch.Tag.data_dependent_output in func.tags:
            self.looks.append(depends)
            if depends:
                raise RuntimeError(f"{func} looks at values")  # as torch raises under `vmap`
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.is_mutable:
            func = self._on_copy(func, args[0])
        results = tree_leaves(result)
        if func is torch.ops.aten.sum.dim_IntList and args[1] == [args[0].dim() - 1]:
            is_slow = args[0].shape[-1] in FEW_ENTRIES and args[0].numel() > FEW_SCALARS
            func = sum_of_few if is_slow else func
        numbers = [self._number(v) if isinstance(v, Tensor) else None for v in results]
        self.depend |= {n for n in numbers if n is not None and depends}
        self.calls.append(Operation(func, values, spec, numbers))
        name = func.__name__.partition(".")[0]
        same = passed_on("clone" if name in COPIES else name, args, result)
        if same is not None and same is not result and same in self.numbers:
            self.passed[self.numbers[result]] = self.numbers[same]
        return result

    def _on_copy(self, func: Any, changed: Tensor) -> Any:
        """Return a function that returns what another changes in place, where nobody else sees it."""
        at = changed.untyped_storage().data_ptr()
        sharing = sum(v.untyped_storage().data_ptr() == at for v in self.numbers)
        name = func._schema.name.partition("::")[2]
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        is_seen = sharing != 1 and torch.Tag.inplace_view not in func.tags
        if not name.endswith("_") or is_seen or not hasattr(packet, func._overloadname):
            self.changes = True
            return func
        self.numbers.pop(changed, None)  # what has its name from now on is another value
        return getattr(packet, func._overloadname)

    def _number(self, tensor: Tensor) -> int:
        if tensor not in self.numbers:  # else it is an argument, changed in place
            self.numbers[tensor], self.count = self.count, self.count + 1
        number: int = self.numbers[tensor]
        return number

    def function(self, results: Sequence[Tensor]) -> Function:
        """Return the function that repeats the operations that the results need."""
        ends: list[Any] = [Value(self.numbers[v]) for v in results]
        calls = self.calls
        if not self.changes:
            calls, ends = simplified(calls, ends, self.passed)

        def run(*inputs: Tensor) -> Any:
            values = repeated(calls, inputs)
            return tuple(values[v.number] if isinstance(v, Value) else v for v in ends)

        return run


class _Again(EagerMode):
    """Lets a function that is run again look at no values but those that it could look at before."""

    def __init__(self, looks: Sequence[bool]) -> None:
        super().__init__()
        self.looks = iter(looks)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags and next(self.looks):
            raise RuntimeError(f"{func} looks at values")
        return func(*args, **(kwargs or {}))


class _Script(NamedTuple):
    """What returns the gradient at points of a shape, and about how long a call of it takes."""

    run: Function
    seconds: float


class Gradient:
    """The gradient of a pure function of points (S, K) and other tensors that returns values (S,)."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.recorded = dict[tuple[torch.Size, ...], _Script]()

    def __call__(self, x: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (S,) and gradients in x (S, K); the first call of a shape records it."""
        return self._at(x, *inputs).run(x, *inputs)

    def seconds(self, x: Tensor, *inputs: Tensor) -> float:
        """Return about how long a call takes, by its counted work."""
        return self._at(x, *inputs).seconds

    def eager(self, x: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and gradients by the function itself."""
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            value = self.function(x, *inputs)
            (slope,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), slope

    def _at(self, x: Tensor, *inputs: Tensor) -> _Script:
        shapes = tuple(v.shape for v in (x, *inputs))
        if shapes not in self.recorded:
            self.recorded[shapes] = _recorded(self.eager, x, *inputs)
        return self.recorded[shapes]


def _recorded(function: Function, x: Tensor, *inputs: Tensor) -> _Script:
    """Return a function's operations in TorchScript; the function itself where its values decide them."""
    tape = _Tape((x, *inputs))
    try:
        with tape:
            results = function(x, *inputs)
        graph = tape.function(results)
        with warnings.catch_warnings():
            # TorchScript is deprecated, and has no successor as fast
            warnings.simplefilter("ignore")
            script: Any = torch.jit.trace(graph, (x, *inputs), check_trace=False)
        calls = count()

        def run(*tensors: Tensor) -> Any:
            with torch.jit.optimized_execution(next(calls) >= FEW):  # type: ignore[attr-defined]
                return script(*tensors)

        away = x + AWAY
        with _Again(tape.looks):  # where nothing ends early either
            compared = function(away, *inputs)
        pairs = list(zip(run(away, *inputs), compared, strict=True))
    except Exception:  # recording fails in many ways; the function itself is right, and slower
        pairs = []
    if pairs and all(torch.allclose(*two, rtol=EXACT, atol=EXACT, equal_nan=True) for two in pairs):
        return _Script(run, tape.seconds(recorded=True))
    with WorkCounter() as counter:
        function(x, *inputs)
    return _Script(function, counter.seconds(recorded=False))
