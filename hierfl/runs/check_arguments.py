"""The kinds of the arguments of `fit`, checked before any work is done."""

from __future__ import annotations

import inspect
import numbers
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hierfl import methods, models
from hierfl.data.clients import ClientData
from hierfl.data.expected import FRAME, expect_client_data, is_frame
from hierfl.method import Method
from hierfl.program.program import Program
from hierfl.program.recipes import recipe_of
from hierfl.program.sites import Family


def check_kinds(method: Any, data: Any, validation: Any, numbers_: Mapping[str, Any]) -> None:
    """Refuse arguments of another kind: a class for a method, a frame for data, a float for rounds.

    Args:
        method: a `Method`, or a model.
        data: `ClientData`.
        validation: `ClientData` or None.
        numbers_: argument -> value, which must be an integer, or None for rounds, chunk and patience; `cohort`
            may be a share as well.

    Raises:
        TypeError: an argument is of another kind; the message names it and the mend.
    """
    if isinstance(method, ClientData) or is_frame(method):
        mend = f", with data = {FRAME}" if is_frame(method) else ""
        raise TypeError(f"method and data are swapped: call fit(method, data, ...){mend}")
    check_method(method)
    expect_client_data(data, "data")
    if validation is not None:
        expect_client_data(validation, "validation")
    check_counts(numbers_)


def check_method(method: Any) -> None:
    """Refuse what is neither a method nor a model, a function of a batch.

    Raises:
        TypeError: it is something else; the message names the mend.
    """
    if isinstance(method, Method):
        _check_optimizers(method)
    elif (wrong := _no_method(method)) is not None:
        raise TypeError(wrong)


def check_counts(numbers_: Mapping[str, Any]) -> None:
    """Refuse arguments of `fit` that should be integers, and are not.

    Args:
        numbers_: as for `check_kinds`.

    Raises:
        TypeError: an argument is of another kind.
    """
    for name, value in numbers_.items():
        if value is None and name in ("rounds", "cohort", "chunk", "patience"):
            continue
        wanted = numbers.Real if name == "cohort" else numbers.Integral
        if not isinstance(value, wanted) or isinstance(value, bool):
            kind = "a count, a share or None" if name == "cohort" else "an integer"
            raise TypeError(f"{name} is {value!r}: it must be {kind}{_whole(name, value)}")


def _whole(name: str, value: object) -> str:
    """Return the integer that a float or a string stands for, as it is to be written."""
    text = str(value).removesuffix(".0")
    return f", {name}={text}" if text.isdecimal() and not isinstance(value, bool) else ""


def _no_method(method: Any) -> str | None:
    """Return what is wrong with a value in the place of a method, and the mend; None: it may be a model."""
    kind = "None" if method is None else type(method).__name__
    name: str = getattr(method, "__name__", kind)
    if name in methods.__all__ and getattr(methods, name) is method:
        wraps = "method" in inspect.signature(getattr(methods, name)).parameters
        of = "hierfl.methods.fedavg(model)" if wraps else "model"
        return f"method is '{name}', which is not called yet: hand over hierfl.methods.{name}({of})"
    if name in models.__all__ and getattr(models, name) is method:
        return (
            f"method is '{name}', which makes a model and is not called yet: hand over "
            f"hierfl.models.{name}(...)"
        )
    if isinstance(method, Family):
        return (
            f"method is the guide family '{name}': hand it to a method, hierfl.methods.fedsvi(model, "
            f"guide=hierfl.guides.{name})"
        )
    if isinstance(method, str):
        made = method if method in methods.__all__ else "fedsvi"
        return f"method is the string '{method}': hand over hierfl.methods.{made}(model)"
    if isinstance(method, Program):
        return "method is a Program, which is read already: hand over hierfl.methods.fedsvi(model), of its model"
    # a Fit takes half a second to import, and nodes check methods too; where there is one, it is imported
    result = sys.modules.get("hierfl.runs.result")
    if result is not None and isinstance(method, result.Fit):
        return "method is a Fit: hand over the method that it was fitted by, fit.method"
    if isinstance(method, torch.nn.Module) and not hasattr(method, "__name__"):
        return f"method is the network '{kind}': wrap it, hierfl.methods.fedavg(hierfl.models.network(net))"
    if callable(method) and not isinstance(method, type):
        return None
    return (
        f"method is '{name}', neither a Method nor a model: hand over hierfl.methods.fedsvi(model), or a "
        f"model, a function of a batch"
    )


def _check_optimizers(method: Method) -> None:
    """Refuse options of a method that should be optimizers, or step sizes, and are not."""
    recipe = recipe_of(method)
    for name, value in ({} if recipe is None else recipe.options).items():
        if isinstance(value, Method):
            _check_optimizers(value)
        elif "optimizer" in name and value is not None:
            if isinstance(value, type) or not hasattr(value, "init"):
                kind = getattr(value, "__name__", type(value).__name__)
                raise TypeError(
                    f"{name} is {kind}: give one of hierfl.optimizers with its step size, Adam(0.01)"
                )
            _check_rate(f"{name}.lr", getattr(value, "lr", 1.0))
        elif name == "lr":
            _check_rate(name, value)


def _check_rate(name: str, value: object) -> None:
    if not isinstance(value, numbers.Real | Tensor):
        raise TypeError(f"{name} is {value!r}: it must be a number above 0")
