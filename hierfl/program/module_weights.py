"""The weights of modules that `pyro.module` registers, replaced by the values of their params.

`pyro.module` declares each weight of a module as a param and returns the module as it is, whose weights are
Pyro's own store. hierfl answers params from a dict, so the weights have to be replaced where they are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hierfl.program.traces import Site


class ModuleWeights(TorchFunctionMode):
    """A mode in which torch's functions take a registered weight's param in place of the weight.

    It is entered at the first registered weight, so that programs without modules do not pay for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, Tensor] = {}

    def take(self, msg: Site) -> None:
        """Note the value of a param, if it was declared with a module's weight as its start."""
        args = msg["args"]
        start = args[1] if len(args) > 1 else None
        if not isinstance(start, nn.Parameter) or start is msg["value"]:
            return
        if not self._values:
            self.__enter__()  # type: ignore[no-untyped-call]
        self._values[id(start)] = msg["value"]

    def leave(self) -> None:
        """End the mode, if it was entered."""
        if self._values:
            self._values = {}
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
            return func(*args)  # pyro.module asks it of the weight itself
        args, kwargs = tree_map(self._replaced, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _replaced(self, value: Any) -> Any:
        return self._values.get(id(value), value) if isinstance(value, nn.Parameter) else value
