"""Recipes: how a method, model, guide or optimiser was made, as JSON.

A recipe goes into a run's record, and `hierfl.load` makes the method again from it. No code is stored:
functions are recorded by name (`hierfl.program.public_names`), and nothing that a file names is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from hierfl.program.public_names import HAND_IN, CannotRemake, find, public_name
from hierfl.program.sites import Family

P = ParamSpec("P")
R = TypeVar("R")
JSON = Any

# The keys of each kind of description.
FORMS = (
    {"made_by", "with"},
    {"family", "with"},
    {"named"},
    {"tensor", "dtype"},
    {"mapping"},
    {"sequence"},
    {"opaque"},
)
# A distribution has each of these parameters, but takes only one of a kind: the right-hand one is kept.
SAME_PARAMETER = {
    "probs": "logits",
    "covariance_matrix": "scale_tril",
    "precision_matrix": "scale_tril",
}
# Options of methods that are wrappers now, but stand in every record of 0.1.0. At these values they do nothing.
RETIRED = {"averaged": 1.0, "beta": 1.0, "by_rows": False, "fine_tune": False}


@dataclass(frozen=True, eq=False)
class Recipe:
    """A factory, as "module:qualname", and the options it was called with."""

    factory: str
    options: Mapping[str, Any]


def recorded(factory: Callable[P, R]) -> Callable[P, R]:
    """Wrap a factory so that what it returns remembers the call: see `recipe_of`."""
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

    made.__dict__["__recorded__"] = True
    return made


def recipe_of(thing: object) -> Recipe | None:
    """Return the recipe that something was made by; None where no recorded factory made it."""
    found = getattr(thing, "__recipe__", None)
    return found if isinstance(found, Recipe) else None


def _name(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def describe(value: Any) -> JSON:
    """Return a value as JSON. What has no JSON form becomes {"opaque": its type} and cannot be remade."""
    recipe = recipe_of(value)
    if recipe is not None:
        return {
            "made_by": public_name(recipe.factory),
            "with": {k: describe(v) for k, v in recipe.options.items()},
        }
    if isinstance(value, torch.distributions.Distribution) and not isinstance(
        value, torch.distributions.Independent
    ):
        return {
            "made_by": public_name(_name(type(value))),
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
            "family": public_name(_name(value.build)),
            "with": {k: describe(v) for k, v in value.options.items()},
        }
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "made_by": public_name(_name(type(value))),
            "with": {f.name: describe(getattr(value, f.name)) for f in fields(value) if f.init},
        }
    if callable(value) and hasattr(value, "__qualname__") and "<" not in value.__qualname__:
        return {"named": public_name(_name(value))}
    return {"opaque": f"{type(value).__module__}.{type(value).__qualname__}"}


def translated(description: JSON) -> JSON:
    """Rewrite a description by hierfl 0.1.0 as it would be written now, so that runs can be compared."""
    if isinstance(description, list):
        return [translated(value) for value in description]
    if not isinstance(description, dict):
        return description
    found: dict[str, Any] = {
        key: public_name(value)
        if key in ("made_by", "family", "named") and isinstance(value, str)
        else translated(value)
        for key, value in description.items()
    }
    if str(found.get("made_by")).startswith("hierfl.methods.") and isinstance(
        found.get("with"), dict
    ):
        found["with"] = {
            k: v for k, v in found["with"].items() if k not in RETIRED or v != RETIRED[k]
        }
    return found


def remake(description: JSON) -> Any:
    """Make again what `describe` has described.

    Args:
        description: JSON, from a file that need not be trusted: what is called are public factories, and
            recorded functions and dataclasses of modules that are already imported.

    Raises:
        CannotRemake: the description is malformed, holds what no file can store, or names something that is
            unknown or refused.
    """
    if description is None or isinstance(description, bool | int | float | str):
        return description
    if not isinstance(description, dict) or set(description) not in FORMS:
        raise CannotRemake(f"{_short(description)} is not a recipe of hierfl: {HAND_IN}")
    if "opaque" in description:
        raise CannotRemake(f"a {description['opaque']} is not stored in a file; {HAND_IN}")
    if "tensor" in description:
        return _tensor(description)
    if "mapping" in description:
        return {k: remake(v) for k, v in _checked(description, "mapping", dict).items()}
    if "sequence" in description:
        return tuple(remake(v) for v in _checked(description, "sequence", list))
    if "named" in description:
        return find(_checked(description, "named", str))
    return _called(description)


def _called(description: dict[str, Any]) -> Any:
    """Call the factory of a description with its options, or set the options of its guide family."""
    key = "made_by" if "made_by" in description else "family"
    name = _checked(description, key, str)
    factory = find(name)
    if key == "family" and not isinstance(factory, Family):
        raise CannotRemake(f"'{name}' is not a guide family: {HAND_IN}")
    if key == "made_by" and not _is_factory(factory):
        raise CannotRemake(
            f"'{name}' is neither a recorded factory nor a dataclass nor a distribution: {HAND_IN}"
        )
    options = {k: remake(v) for k, v in _checked(description, "with", dict).items()}
    if isinstance(factory, type) and issubclass(factory, torch.distributions.Distribution):
        options = {k: v for k, v in options.items() if SAME_PARAMETER.get(k) not in options}
    try:
        if isinstance(factory, Family):
            inspect.signature(factory.build).bind_partial(None, None, **options)
        return factory(**options)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CannotRemake(
            f"'{name}' does not take what the recipe holds ({error}): {HAND_IN}"
        ) from error


def _is_factory(found: Any) -> bool:
    """Whether `describe` could have written it as "made_by": it makes a value and does nothing else."""
    if isinstance(found, type):
        return is_dataclass(found) or issubclass(found, torch.distributions.Distribution)
    return getattr(found, "__recorded__", False) is True


def _tensor(description: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, _checked(description, "dtype", str), None)
    if not isinstance(dtype, torch.dtype):
        raise CannotRemake(f"'{description['dtype']}' is not a dtype of torch: {HAND_IN}")
    try:
        return torch.tensor(description["tensor"], dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CannotRemake(f"{_short(description)} is not a tensor ({error}): {HAND_IN}") from error


def _checked(description: dict[str, Any], key: str, kind: type) -> Any:
    value = description[key]
    if not isinstance(value, kind):
        raise CannotRemake(
            f"'{key}' of a recipe is {_short(value)}, not a {kind.__name__}: {HAND_IN}"
        )
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
