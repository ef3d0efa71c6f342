"""What the process computes with: variables of the context, turns, time, memory, a device.

A device computes chunks of clients; server, client states and history stay on the CPU.
"""

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hierfl.core.trees import Tree, tree_leaves, tree_map

# M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, as in glibc's malloc.h.
TRIM, TOP_PAD, MMAP = -1, -2, -3
KEPT = {MMAP: 32 << 20, TRIM: 256 << 20, TOP_PAD: 16 << 20}  # bytes; glibc refuses a larger MMAP
EVERY = 10.0  # seconds between two lines of a watch
CPU = torch.device("cpu")


def keep_memory() -> bool:
    """Raise glibc's malloc thresholds: to remap freed tensors took a quarter of FedABML's time on W1."""
    set_by_user = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & set(os.environ)
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if not sys.platform.startswith("linux") or set_by_user or tuned:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and list(map(mallopt, KEPT, KEPT.values())) == [1] * len(KEPT)


TORCH_BROADCAST_SHAPES: Any = torch.broadcast_shapes
P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def replaced(instead: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Let attributes (of what, its name) have other values meanwhile."""
    before = [(where, name, vars(where)[name]) for where, name, _ in instead]
    for where, name, value in instead:
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)


@contextmanager
def set_to(variable: ContextVar[R], value: R) -> Iterator[None]:
    """Let a variable of the context have a value meanwhile."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_turn: list[Any] = [RLock()]


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that only one thread at a time runs any such function."""

    @wraps(function)
    def in_turn(*args: P.args, **kwargs: P.kwargs) -> R:
        with _turn[0], replaced([(torch, "broadcast_shapes", _broadcast_shapes)]):
            return function(*args, **kwargs)

    return in_turn


def _broadcast_shapes(*shapes: Any) -> torch.Size:
    """Return what torch's function returns, which imports sympy, 0.5 s, for any joint Normal."""
    try:
        return torch.Size(np.broadcast_shapes(*shapes))
    except (TypeError, ValueError):  # symbolic sizes; or no common shape, which torch says better
        shape: torch.Size = TORCH_BROADCAST_SHAPES(*shapes)
        return shape


def _new_turn() -> None:
    """Give a fork its own lock: the thread that held the old one was not copied."""
    _turn[0] = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_turn)


def unpickled(instead: str) -> Callable[[type[R]], type[R]]:
    """Decorate a class of functions, which pickle cannot store: say what to do; a copy is the value."""

    def decorated(kind: type[R]) -> type[R]:
        def refuse(self: R, protocol: object = None) -> Any:
            raise TypeError(f"a {kind.__name__} cannot be pickled: {instead}")

        def same(self: R, memo: object = None) -> R:
            return self

        for name, method in (("__reduce_ex__", refuse), ("__copy__", same), ("__deepcopy__", same)):
            setattr(kind, name, method)
        return kind

    return decorated


class TooLarge(ValueError):
    """An operation asks for more memory than allowed, or there are more operations than allowed."""


class EagerMode(TorchDispatchMode):
    """A mode that nothing compiled meets: else torch imports its compiler, two seconds of a fit."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Limit(EagerMode):
    """Refuses too many operations, or too large results, as found on the meta device without memory."""

    def __init__(self, size: int, operations: int) -> None:
        super().__init__()
        self.size, self.left = size, operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise TooLarge("it takes more operations than any program of hierfl")
        options = kwargs or {}
        self._check(func, args, options)
        return func(*args, **options)

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        if self._is_small([*tree_flatten(args)[0], *tree_flatten(kwargs)[0]]):
            return

        def moved(leaf: Any) -> Any:
            return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

        options = tree_map(moved, kwargs)
        if "device" in options:
            options["device"] = torch.device("meta")
        try:
            result = func(*tree_map(moved, args), **options)
        except (NotImplementedError, RuntimeError):
            return  # its size depends on values, and is at most that of an argument
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.nbytes > self.size:
                raise TooLarge(f"it asks for {leaf.nbytes} bytes, a tensor {tuple(leaf.shape)}")

    def _is_small(self, leaves: list[Any]) -> bool:
        """Return whether no result of such arguments can be too large: a bound, in a tenth of the time."""
        # as large as the outer product of all with all, repeated as often as any number says
        bound = 4.0 * max(1, len(leaves))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                bound *= max(1, leaf.numel())
            elif isinstance(leaf, int | float) and leaf:
                bound *= max(abs(leaf), 1.0 / abs(leaf))
        return bound * bound <= self.size


class OutOfTime(Exception):
    """A computation has taken as long as it may, or would take longer than another; says which."""


@dataclass(eq=False)
class Watch:
    """What a computation that is `watched` may take, and who is told how far it is."""

    say: Callable[[str], None] | None = None
    limit: float = math.inf  # seconds after which it ends
    # whether something else takes less than so many seconds, counted by work
    has_faster: Callable[[float], bool] | None = None

    def __post_init__(self) -> None:
        """Start."""
        self.began = self.last = time.perf_counter()

    def look(self, what: str) -> None:
        """Say what is done, every ten seconds; raise `OutOfTime` beyond the limit."""
        now = time.perf_counter()
        if self.say is not None and now - self.last >= EVERY:
            self.last = now
            self.say(f"{what}, {now - self.began:.0f} s so far")
        if now - self.began >= self.limit:
            raise OutOfTime(f"the rounds took the time limit, {self.limit:.3g} s")


_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


def watched(watch: Watch | None) -> AbstractContextManager[None]:
    """Let long loops report to a watch; to none if it is None."""
    return set_to(_WATCH, watch)


def working(what: str) -> None:
    """Report one step of a long loop."""
    watch = _WATCH.get()
    if watch is not None:
        watch.look(what)


def about_to(why: str, seconds: Callable[[], float]) -> None:
    """Raise `OutOfTime` where a watch has a faster way than what is about to begin."""
    watch = _WATCH.get()
    if watch is not None and watch.has_faster is not None and watch.has_faster(seconds()):
        raise OutOfTime(why)


def device_of(name: str | torch.device) -> torch.device:
    """Return the device of a name such as "cuda:1"; a ValueError where there is none."""
    try:
        device = torch.device(name)
        if device.type != "cpu":
            torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either, by kind of device
        raise ValueError(
            f"device={str(name)!r} cannot be used here (torch finds no such device): use "
            f"device='cpu'"
        ) from error
    return device


def moved(tree: Tree, device: torch.device) -> Tree:
    """Return a tree with its tensors on `device`; tensors that are already there are not copied."""
    return tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, tree)


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Create tensors on `device` within this context; CPU tensors that meet one there are moved."""
    with ExitStack() as stack:
        if device.type != "cpu":
            stack.enter_context(device)
            stack.enter_context(_MoveCpuArguments(device))
        yield


class _MoveCpuArguments(TorchFunctionMode):
    """Move CPU tensors to the device in operations that mix the two; torch moves scalars itself."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._type = device.type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        target = next((value.device for value in tensors if value.device.type == self._type), None)
        if target is not None and any(map(_is_on_cpu, tensors)):
            args, kwargs = tree_map(lambda v: v.to(target) if _is_on_cpu(v) else v, (args, kwargs))
        return func(*args, **kwargs)


def _is_on_cpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() > 0


@contextmanager
def double_precision() -> Iterator[None]:
    """Run in double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
