"""A function of tensors as a list of torch's operations, without the Python around them.

`make_fx` would do, but imports sympy and dynamo first, which takes longer than many a fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# what looks at a tensor's values: where these depend on the inputs, the function has branches
LOOKS = frozenset("__bool__ __int__ __float__ __index__ __contains__ item tolist numpy".split())
LOOKS |= {"nonzero", "unique", "equal", "allclose", "is_nonzero"}
MUL = (Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__)
DIV = (Tensor.div, torch.div, Tensor.__truediv__)
ADD = (Tensor.add, torch.add, Tensor.__add__, Tensor.__radd__)
SUB = (Tensor.sub, torch.sub, Tensor.__sub__)
CAT, SUM = (torch.cat, torch.concat), (Tensor.sum, torch.sum)


@dataclass(frozen=True)
class Value:
    """A tensor of a graph: one of its inputs or what one of its operations returns."""

    number: int


@dataclass(frozen=True, eq=False)
class Operation:
    """One call of torch, with `Value`s in place of the tensors that depend on the inputs."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    found: tuple[int | None, ...]  # numbers of the tensors that it returns
    single: bool  # it returns a tensor, not a tuple


class NoGraph(Exception):
    """The function looks at values, or changes tensors in place."""


class _Recorder(TorchFunctionMode):
    """Notes every call of torch that depends on the inputs."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.numbers: dict[int, int] = {id(v): i for i, v in enumerate(inputs)}
        self.kept: list[Any] = list(inputs)  # an id is reused once its tensor is gone
        self.operations: list[Operation] = []
        self.known: dict[Any, Operation] = {}
        self.count = len(self.kept)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        called = self._with_values((args, kwargs))
        if not _numbers_in(called):
            return result
        name = getattr(func, "__name__", "")
        if name in LOOKS or _in_place(name, kwargs):
            raise NoGraph(name)
        single = isinstance(result, Tensor)
        found = (result,) if single else result
        if not isinstance(found, tuple | list) or not any(isinstance(v, Tensor) for v in found):
            return result  # a shape, a dtype
        same = _passed_on(func, args, result)
        if same is not None and id(same) in self.numbers:
            self._name(result, self.numbers[id(same)])
            return result
        key = (func, _key(called))
        if key in self.known:
            for v, number in zip(found, self.known[key].found, strict=True):
                self._name(v, number)
            return result
        numbers = tuple(self._new(v) if isinstance(v, Tensor) else None for v in found)
        self.known[key] = Operation(func, called[0], called[1], numbers, single)
        self.operations.append(self.known[key])
        return result

    def _with_values(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            number = self.numbers.get(id(tree))
            self.kept.append(tree)
            return tree if number is None else Value(number)
        if isinstance(tree, dict):
            return {name: self._with_values(v) for name, v in tree.items()}
        if type(tree) in (tuple, list):
            return type(tree)(self._with_values(v) for v in tree)
        return tree

    def _new(self, tensor: Tensor) -> int:
        if id(tensor) not in self.numbers:  # else an operation returned its argument itself
            self._name(tensor, self.count)
            self.count += 1
        return self.numbers[id(tensor)]

    def _name(self, tensor: Any, number: int | None) -> None:
        if isinstance(tensor, Tensor) and number is not None:
            self.numbers[id(tensor)] = number
            self.kept.append(tensor)


def graph_of(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[..., Tensor] | None:
    """Return what a pure function does with such inputs; None where values decide it."""
    recorder = _Recorder(inputs)
    try:
        with torch.no_grad(), recorder:
            result = function(*inputs)
    except (NoGraph, RuntimeError, TypeError, ValueError):
        return None
    end = recorder.numbers.get(id(result))
    if end is None:
        return None
    operations = _needed(recorder.operations, end)

    def run(*given: Tensor) -> Tensor:
        values: dict[int, Any] = dict(enumerate(given))
        for of in operations:
            found = of.function(*_filled(of.args, values), **_filled(of.kwargs, values))
            if of.single:
                values[of.found[0]] = found  # type: ignore[index]
            else:
                values |= {n: v for n, v in zip(of.found, found, strict=True) if n is not None}
        return values[end]

    return run


def _needed(operations: list[Operation], end: int) -> list[Operation]:
    """Return the operations that the end depends on."""
    wanted, kept = {end}, []
    for of in reversed(operations):
        if wanted.intersection(of.found):
            kept.append(of)
            wanted |= _numbers_in((of.args, of.kwargs))
    return kept[::-1]


def _numbers_in(tree: Any) -> set[int]:
    if isinstance(tree, Value):
        return {tree.number}
    tree = list(tree.values()) if isinstance(tree, dict) else tree
    return set().union(*map(_numbers_in, tree if isinstance(tree, tuple | list) else ()))


def _filled(tree: Any, values: dict[int, Any]) -> Any:
    if isinstance(tree, Value):
        return values[tree.number]
    if isinstance(tree, dict):
        return {name: _filled(v, values) for name, v in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)([_filled(v, values) for v in tree])
    return tree


def _key(tree: Any) -> Any:
    """Return a key that is equal for equal arguments alone."""
    if isinstance(tree, dict):
        return "dict", *((name, _key(v)) for name, v in sorted(tree.items()))
    if type(tree) in (tuple, list):
        return type(tree), *map(_key, tree)
    if isinstance(tree, Tensor):
        return "tensor", id(tree)
    if isinstance(tree, Value | str | int | float | None | torch.dtype | torch.device | torch.Size):
        return type(tree), repr(tree)
    return "object", id(tree)


def _in_place(name: str, kwargs: dict[str, Any]) -> bool:
    changes = name.endswith("_") and not name.endswith("__")
    return changes or name in ("__setitem__", "__set__") or kwargs.get("out") is not None


def _passed_on(func: Any, args: tuple[Any, ...], result: Any) -> Tensor | None:
    """Return the argument whose values a call returned unchanged: else a pass over all rows."""
    if func in CAT and len(args[0]) == 1:
        return args[0][0]
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not isinstance(result, Tensor):
        return None
    if first.dtype != result.dtype or first.shape != result.shape:
        return None
    by = args[1] if len(args) > 1 and type(args[1]) in (int, float) else None
    idle = by == 1 and (func in MUL or func in DIV)
    idle |= by == 0 and (func in ADD or func in SUB)
    idle |= func in SUM and first.numel() == 1
    idle |= getattr(func, "__name__", "") in ("expand", "view", "reshape", "contiguous", "clone")
    return first if idle else None
