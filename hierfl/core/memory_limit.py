"""Limits on what torch may be asked for, refused before memory is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map


class TooLarge(ValueError):
    """An operation asks for more memory than allowed, or there are more operations than allowed."""


@contextmanager
def at_most(size: int, operations: int) -> Iterator[None]:
    """Refuse operations of torch whose results are too large, and a run of too many of them.

    Operations take about thrice as long inside.

    Args:
        size: bytes of one result, at most.
        operations: how many there are, at most.

    Raises:
        TooLarge: (inside) a limit is passed.
    """
    with _Limit(size, operations):
        yield


class _Limit(TorchDispatchMode):
    """Finds the size of each result on the meta device, where it takes no memory."""

    def __init__(self, size: int, operations: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.left = size, operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise TooLarge("it takes more operations than any program of hierfl")
        options = kwargs or {}
        self._check(func, args, options)
        return func(*args, **options)

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
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
