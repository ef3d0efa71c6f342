"""The kinds of the arguments of `fit`, checked before any work is done."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hierfl.data.clients import ClientData
from hierfl.data.expected import expect_client_data
from hierfl.method import Method
from hierfl.program.recipes import recipe_of


def check_kinds(method: Any, data: Any, held_out: Any, numbers_: Mapping[str, Any]) -> None:
    """Refuse arguments of another kind: a model or a class for a method, a frame for data, a float for rounds.

    Args:
        method: a `Method`.
        data: `ClientData`.
        held_out: `ClientData` or None.
        numbers_: argument -> value, which must be an integer, or None for rounds, chunk and patience; `cohort`
            may be a share as well.

    Raises:
        TypeError: an argument is of another kind; the message names it and the mend.
    """
    if isinstance(method, ClientData) and isinstance(data, Method):
        raise TypeError("method and data are swapped: call fit(method, data, ...)")
    if not isinstance(method, Method):
        name = getattr(method, "__name__", type(method).__name__)
        made = str(getattr(method, "__module__", "")).startswith("hierfl.methods")
        mend = f"hierfl.methods.{name}(model)" if made else "hierfl.methods.fedsvi(model)"
        raise TypeError(f"method is '{name}', not a Method: make one of a model, {mend}")
    _check_optimisers(method)
    expect_client_data(data, "data")
    if held_out is not None:
        expect_client_data(held_out, "held_out")
    for name, value in numbers_.items():
        if value is None and name in ("rounds", "cohort", "chunk", "patience"):
            continue
        wanted = numbers.Real if name == "cohort" else numbers.Integral
        if not isinstance(value, wanted):
            kind = "a count, a share or None" if name == "cohort" else "an integer"
            raise TypeError(f"{name} is {value!r}: it must be {kind}")


def _check_optimisers(method: Method) -> None:
    """Refuse options of a method that should be optimisers, or step sizes, and are not."""
    recipe = recipe_of(method)
    for name, value in ({} if recipe is None else recipe.options).items():
        if isinstance(value, Method):
            _check_optimisers(value)
        elif "optimiser" in name and value is not None:
            if isinstance(value, type) or not hasattr(value, "init"):
                kind = getattr(value, "__name__", type(value).__name__)
                raise TypeError(
                    f"{name} is {kind}: give one of hierfl.optimisers with its step size, Adam(0.01)"
                )
            _check_rate(f"{name}.lr", getattr(value, "lr", 1.0))
        elif name == "lr":
            _check_rate(name, value)


def _check_rate(name: str, value: object) -> None:
    if not isinstance(value, numbers.Real | Tensor):
        raise TypeError(f"{name} is {value!r}: it must be a number above 0")
