"""Where chunks of clients are worked on: the processor, or an accelerator beside it.

An accelerator holds the clients' rows and what a chunk is working on. The server's state, what clients keep and the history stay
with the processor, so checkpoints, posteriors and reports know nothing of it.
"""

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
    """The device of a name such as "cpu", "cuda" or "cuda:1".

    Raises:
        ValueError: there is no such device here.
    """
    try:
        device = torch.device(name)
        if device.type != "cpu":
            torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's two ways to say so
        raise ValueError(
            f"device={str(name)!r} cannot be used here ({str(error).splitlines()[0]}): leave device='cpu'"
        ) from error
    return device


def moved(tree: Tree, device: torch.device) -> Tree:
    """A tree on a device; what is there already is not copied."""
    return tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, tree)


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """New tensors are made on a device, and what programs hold elsewhere (constants, buffers) follows to it where the two meet."""
    with ExitStack() as stack:
        if device.type != "cpu":
            stack.enter_context(device)
            stack.enter_context(_Following(device))
        yield


class _Following(TorchFunctionMode):
    """Tensors on the processor are moved where they are used together with one on the device; single numbers torch moves itself."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._type = device.type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        there = next((value.device for value in given if value.device.type == self._type), None)
        if there is not None and any(map(_left_behind, given)):
            args, kwargs = tree_map(lambda v: v.to(there) if _left_behind(v) else v, (args, kwargs))
        return func(*args, **kwargs)


def _left_behind(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() > 0
