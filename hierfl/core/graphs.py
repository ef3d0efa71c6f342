"""Functions as lists of torch's operations; `make_fx` imports sympy and dynamo, which is slow."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

# what looks at a tensor's values: where these depend on the inputs, the function has branches
LOOKS = frozenset("__bool__ __int__ __float__ __index__ __contains__ item tolist numpy".split())
LOOKS |= {"nonzero", "unique", "equal", "allclose", "is_nonzero"}
# what returns its first argument if the second is 1 or 0, or if shapes are equal
IDLE_AT_1 = frozenset("mul __mul__ __rmul__ div __truediv__".split())
IDLE_AT_0 = frozenset("add __add__ __radd__ sub __sub__".split())
SHAPES = frozenset("expand view reshape contiguous clone".split())
# what copies entries of its first argument
MOVES = frozenset("__getitem__ split reshape view flatten squeeze unsqueeze expand".split())
MOVES |= {"to", "movedim", "permute", "cat", "concat", "stack"}
# what changes its first argument, as do functions named by a last "_"
CHANGES = frozenset("__setitem__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__".split())


class Value(NamedTuple):
    """A tensor of a graph: one of its inputs or what one of its operations returns."""

    number: int


class Operation(NamedTuple):
    """One call of torch."""

    function: Callable[..., Any]
    leaves: list[Any]  # of args and kwargs, with `Value`s for tensors of the graph
    spec: TreeSpec
    results: list[int | None]  # numbers of the tensors that it returns


class NoGraph(Exception):
    """The function looks at values, or changes tensors that others may read."""


class _Recorder(TorchFunctionMode):
    """Notes every call of torch that depends on the inputs."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.numbers: dict[int, int] = {id(v): i for i, v in enumerate(inputs)}
        self.kept: list[Any] = list(inputs)  # an id is reused once its tensor is gone
        self.operations: list[Operation] = []
        self.known: dict[Any, Operation] = {}
        self.count = len(self.kept)
        # of values of which some entries are constant: which depend on the inputs
        self.depends: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        self.kept += leaves
        leaves = [Value(self.numbers[id(v)]) if id(v) in self.numbers else v for v in leaves]
        name = getattr(func, "__name__", "")
        changes = name in CHANGES or (name.endswith("_") and not name.endswith("__"))
        if not any(isinstance(v, Value) for v in leaves):
            if changes and args and isinstance(args[0], Tensor):
                self._check_unread(args[0])
            return result
        if name in LOOKS or name == "__set__" or kwargs.get("out") is not None:
            raise NoGraph(name)
        if changes:
            func, result = self._copying(func, args[0]), args[0]
        results = (result,) if isinstance(result, Tensor) else result
        if not isinstance(results, tuple | list) or not any(isinstance(v, Tensor) for v in results):
            return result  # a shape, a dtype
        results = tree_leaves(result)
        same = passed_on(name, args, result)
        if id(same) in self.numbers:
            self._name(result, self.numbers[id(same)])
            return result
        key = (func, repr(spec), *map(_key, leaves))
        if key not in self.known:
            masks = self._masks(func, args, kwargs) if name in MOVES else [None] * len(results)
            numbers = [self._new(*of) for of in zip(results, masks, strict=True)]
            self.known[key] = Operation(func, leaves, spec, numbers)
            self.operations.append(self.known[key])
        for v, number in zip(results, self.known[key].results, strict=True):
            self._name(v, number)
        return result

    def _copying(self, func: Callable[..., Any], changed: Tensor) -> Callable[..., Tensor]:
        """Return an operation that changes a tensor as one on a copy, where nobody else sees the tensor."""
        at = changed.untyped_storage().data_ptr()  # of views too, and of what `detach` returns
        others = [
            v
            for v in self.kept
            if isinstance(v, Tensor) and v is not changed and v.untyped_storage().data_ptr() == at
        ]
        # what has its name from now on is another value
        own = self.numbers.pop(id(changed), None) is not None
        if not own or others or changed._is_view() or any(changed is v for v in self.inputs):
            raise NoGraph("changes what others may read")

        def on_copy(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            copy = tensor.clone()
            func(copy, *args, **kwargs)
            return copy

        return on_copy

    def _check_unread(self, changed: Tensor) -> None:
        """Refuse a change of a tensor that does not depend on the inputs, and was read beside them."""
        at = changed.untyped_storage().data_ptr()
        values = [v for v in self.kept if isinstance(v, Tensor) and id(v) in self.numbers]
        read = [v for of in self.operations for v in of.leaves if isinstance(v, Tensor)]
        if any(v.untyped_storage().data_ptr() == at for v in values + read):
            raise NoGraph("changes what an operation has read")

    def _masks(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Tensor | None]:
        """Return which entries of what a function moves depend on the inputs; None: all."""
        moved = args[0] if isinstance(args[0], tuple | list) else args[:1]
        numbers = [self.numbers.get(id(v)) for v in moved]
        masks = [
            v.new_full(v.shape, n is not None) if n not in self.depends else self.depends[n].to(v)
            for v, n in zip(moved, numbers, strict=True)
        ]
        first = masks if moved is args[0] else masks[0]
        return [v.bool() for v in tree_leaves(func(first, *args[1:], **kwargs))]

    def _new(self, tensor: Any, depends: Tensor | None) -> int | None:
        """Return the number of what an operation returns; None: it is constant, or no tensor."""
        if not isinstance(tensor, Tensor) or (depends is not None and not bool(depends.any())):
            return None
        if id(tensor) not in self.numbers:  # else an operation returned its argument itself
            self.numbers[id(tensor)] = self.count
            if depends is not None and not bool(depends.all()):
                self.depends[self.count] = depends
            self.count += 1
        return self.numbers[id(tensor)]

    def _name(self, tensor: Any, number: int | None) -> None:
        self.kept.append(tensor)
        if number is not None:
            self.numbers[id(tensor)] = number


class Recording(NamedTuple):
    """What a pure function does."""

    operations: list[Operation]
    end: int  # the number of what it returns

    def values(self, *inputs: Tensor) -> dict[int | None, Any]:
        """Return the tensors of the graph at other inputs, by number."""
        return repeated(self.operations, inputs)


def needed_by(ends: Iterable[int], operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations of a graph that some of its tensors need."""
    kept, needed = list[Operation](), set[int | None](ends)
    for of in reversed(operations):
        if needed.intersection(of.results):
            kept.append(of)
            needed.update(v.number for v in of.leaves if isinstance(v, Value))
    return kept[::-1]


def simplified(
    operations: Sequence[Operation], ends: Sequence[Value], passed: Mapping[int | None, int]
) -> tuple[list[Operation], list[Any]]:
    """Return what a graph without changes in place needs for its ends, and what these are in it.

    Calls of constants are made here, and calls that repeat another are left out.

    Args:
        operations: of the graph.
        ends: the tensors that are asked for.
        passed: numbers of what calls returned unchanged -> the numbers of their arguments.
    """
    others, first = dict[int | None, Any](), dict[Any, Operation]()
    for of in needed_by([end.number for end in ends], operations):
        leaves = [others.get(v.number, v) if isinstance(v, Value) else v for v in of.leaves]
        is_constant = not any(isinstance(v, Value) for v in leaves)
        is_random = torch.Tag.nondeterministic_seeded in getattr(of.function, "tags", ())
        key = (of.function, repr(of.spec), *map(_key, leaves))
        if of.results[0] in passed:
            number = passed[of.results[0]]
            others[of.results[0]] = others.get(number, Value(number))
        elif is_constant and not is_random:
            args, kwargs = tree_unflatten(leaves, of.spec)
            others.update(zip(of.results, tree_leaves(of.function(*args, **kwargs)), strict=True))
        elif key in first and not is_random:
            same = (None if n is None else Value(n) for n in first[key].results)
            others.update(zip(of.results, same, strict=True))
        else:
            first[key] = of._replace(leaves=leaves)
    ends = [others.get(end.number, end) for end in ends]
    calls = needed_by([v.number for v in ends if isinstance(v, Value)], [*first.values()])
    return calls, ends


def recorded(function: Callable[..., Tensor], *inputs: Tensor) -> Recording | None:
    """Return what a pure function does with such inputs; None where values decide it."""
    recorder = _Recorder(inputs)
    try:
        with torch.no_grad(), recorder:
            result = function(*inputs)
    except (NoGraph, RuntimeError, TypeError, ValueError):
        return None
    end = recorder.numbers.get(id(result))
    return None if end is None else Recording(recorder.operations, end)


def graph_of(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[..., Tensor] | None:
    """Return a pure function's own operations as a function; None where values decide it."""
    seen = recorded(function, *inputs)
    if seen is None:
        return None
    operations = needed_by([seen.end], seen.operations)
    return lambda *inputs: repeated(operations, inputs)[seen.end]


def repeated(operations: Sequence[Operation], inputs: Sequence[Tensor]) -> dict[int | None, Any]:
    """Return the tensors of a graph at other inputs, by number."""
    values: dict[int | None, Any] = dict(enumerate(inputs))
    for of in operations:
        leaves = [values[v.number] if isinstance(v, Value) else v for v in of.leaves]
        args, kwargs = tree_unflatten(leaves, of.spec)
        values.update(zip(of.results, tree_leaves(of.function(*args, **kwargs)), strict=True))
    return values


def _key(leaf: Any) -> Any:
    """Return a key that is equal for equal arguments alone."""
    if isinstance(leaf, Value | str | int | float | None | torch.dtype | torch.device | torch.Size):
        return type(leaf), repr(leaf)
    if isinstance(leaf, Tensor) and leaf.numel() == 1 and not leaf.requires_grad:
        return "number", leaf.dtype, leaf.shape, repr(leaf.item())
    return "object", id(leaf)


def passed_on(name: str, args: tuple[Any, ...], result: Any) -> Tensor | None:
    """Return the argument whose values a call returned unchanged: else a pass over all rows."""
    if name in ("cat", "concat") and len(args[0]) == 1:
        return args[0][0]
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not isinstance(result, Tensor):
        return None
    if first.dtype != result.dtype or first.shape != result.shape:
        return None
    if first.stride() != result.stride():  # a view of one may be none of the other
        return None
    by = args[1] if len(args) > 1 and type(args[1]) in (int, float) else None
    idle = (by == 1 and name in IDLE_AT_1) or (by == 0 and name in IDLE_AT_0)
    return first if idle or name in SHAPES or (name == "sum" and first.numel() == 1) else None
