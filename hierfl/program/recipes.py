"""What a method, a model, a guide or an optimiser was made with, as JSON: for records, and to make it again on `load`.

Code is never stored. A recipe names functions by module and name, and `remake` looks them up among hierfl's own and the modules
that the caller has already imported; it imports nothing that a file names.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from hierfl.program.sites import Family

P = ParamSpec("P")
R = TypeVar("R")
JSON = Any


class CannotRemake(ValueError):
    """A recipe names something that cannot be found or made again; the message says what to pass instead."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """A factory and what it was called with."""

    factory: str
    options: Mapping[str, Any]


def recorded(factory: Callable[P, R]) -> Callable[P, R]:
    """Let what `factory` returns remember the call: `recipe_of(result)`."""
    signature = inspect.signature(factory)

    @wraps(factory)
    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        result = factory(*args, **kwargs)
        options = {
            k: v
            for k, v in bound.arguments.items()
            if signature.parameters[k].kind is not inspect.Parameter.VAR_KEYWORD
        }
        extra: dict[str, Any] = next(
            (v for k, v in bound.arguments.items() if k not in options), {}
        )
        object.__setattr__(result, "__recipe__", Recipe(_name(factory), {**options, **extra}))
        return result

    return made


def recipe_of(thing: object) -> Recipe | None:
    """The recipe that something was made by, if it is known."""
    found = getattr(thing, "__recipe__", None)
    return found if isinstance(found, Recipe) else None


def _name(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def describe(value: Any) -> JSON:
    """A value as JSON; what has no JSON is described by {"opaque": ...} and cannot be made again."""
    recipe = recipe_of(value)
    if recipe is not None:
        return {
            "made_by": recipe.factory,
            "with": {k: describe(v) for k, v in recipe.options.items()},
        }
    if isinstance(value, torch.distributions.Distribution) and not isinstance(
        value, torch.distributions.Independent
    ):
        return {
            "made_by": _name(type(value)),
            "with": {k: describe(getattr(value, k)) for k in value.arg_constraints},
        }
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() <= 1000:
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"mapping": {str(k): describe(v) for k, v in value.items()}}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return {"sequence": [describe(v) for v in value]}
    if isinstance(value, Family):
        return {
            "family": _name(value.build),
            "with": {k: describe(v) for k, v in value.options.items()},
        }
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "made_by": _name(type(value)),
            "with": {f.name: describe(getattr(value, f.name)) for f in fields(value) if f.init},
        }
    if callable(value) and hasattr(value, "__qualname__") and "<" not in value.__qualname__:
        return {"named": _name(value)}
    return {"opaque": f"{type(value).__module__}.{type(value).__qualname__}"}


def remake(value: JSON) -> Any:
    """Make again what `describe` describes.

    Raises:
        CannotRemake: a function that is not of hierfl and not imported yet, or a thing that has no recipe.
    """
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    if "mapping" in value:
        return {k: remake(v) for k, v in value["mapping"].items()}
    if "sequence" in value:
        return tuple(remake(v) for v in value["sequence"])
    if "made_by" in value:
        return _find(value["made_by"])(**{k: remake(v) for k, v in value["with"].items()})
    if "family" in value:
        return _find(value["family"])(**{k: remake(v) for k, v in value["with"].items()})
    if "named" in value:
        return _find(value["named"])
    raise CannotRemake(
        f"a {value.get('opaque', 'value')} is not stored in a file; hand the method in: load(..., method=...)"
    )


def _find(name: str) -> Any:
    module, _, qualname = name.partition(":")
    if module.split(".")[0] == "hierfl":
        importlib.import_module(module)
    if module not in sys.modules:
        raise CannotRemake(
            f"'{qualname}' of module '{module}' is not imported: import it, or hand the method in: load(..., method=...)"
        )
    found: Any = sys.modules[module]
    for part in qualname.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise CannotRemake(
                f"module '{module}' has no '{qualname}': hand the method in: load(..., method=...)"
            )
    return found
