"""The device that computes chunks of clients; server, client states and history stay on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hierfl.core.trees import Tree, tree_leaves, tree_map

CPU = torch.device("cpu")


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
