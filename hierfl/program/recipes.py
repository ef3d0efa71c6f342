"""Recipes: how a method, model, guide or optimizer was made, as JSON, and how two differ; no code is stored."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch

from hierfl.program.fingerprints import PYTHON, RELEASED, differing, fingerprint
from hierfl.program.public_names import (
    HAND_IN,
    CannotRemake,
    Kind,
    exported,
    find,
    marked,
    name_of,
    place_of,
    public_name,
)
from hierfl.program.sites import Family, recipe_of

JSON = Any

MOST = 1 << 31  # of a count in a recipe
COUNTS: tuple[Any, ...] = (int, int | None, "int", "int | None")  # annotations of one
# The keys of each kind of description; "code" may stand beside all but the values.
FORMS = [{"made_by", "with"}, {"family", "with"}, {"tensor", "dtype"}]
FORMS += [{key} for key in ("named", "marked", "opaque", "mapping", "sequence")]
VALUES = {"tensor", "mapping", "sequence"}
# A distribution has all of these parameters but takes one of a kind: the right-hand one is kept.
SAME_PARAMETER = {
    "probs": "logits",
    "covariance_matrix": "scale_tril",
    "precision_matrix": "scale_tril",
}
KINDS: dict[str, Kind] = {"model": "model", "guide": "guide"}  # option of a method -> its kind


def describe(value: Any, *, fixed: bool = False) -> JSON:
    """Return a value as JSON, or {"opaque": its type}; `fixed` weights of modules count as constants."""
    marked = {kind: name for kind in KINDS.values() if (name := name_of(value, kind)) is not None}
    if marked:
        return {"marked": next(iter(marked.values())), "code": fingerprint(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() <= 1000:
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"mapping": {str(k): describe(v) for k, v in value.items()}}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return {"sequence": [describe(v) for v in value]}
    call = _call_of(value)
    if call is not None:
        form, factory, options = call
        fixed = options.get("prior_loc") == "module"
        with_ = {k: describe(v, fixed=fixed) for k, v in options.items()}
        return {form: public_name(place_of(factory)), "with": with_, **_code_of(factory)}
    if callable(value) and hasattr(value, "__qualname__") and "<" not in value.__qualname__:
        return {"named": public_name(place_of(value)), **_code_of(value)}
    return {
        "opaque": f"{type(value).__module__}.{type(value).__qualname__}",
        "code": fingerprint(value, fixed=fixed),
    }


def _call_of(value: Any) -> tuple[str, Any, Mapping[str, Any]] | None:
    """Return the call that makes a value: its form, the factory and its options."""
    recipe = recipe_of(value)
    if recipe is not None:
        return "made_by", recipe.factory, recipe.options
    if isinstance(value, Family):
        return "family", value.build, value.options
    if isinstance(value, torch.distributions.Independent):
        return None
    if isinstance(value, torch.distributions.Distribution):
        names = list(value.arg_constraints)
    elif is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value) if f.init]
    else:
        return None
    return "made_by", type(value), {name: getattr(value, name) for name in names}


def _code_of(thing: Any) -> dict[str, Any]:
    """Return the fingerprint of what is no part of a release, as an entry of its description."""
    if str(thing.__module__).partition(".")[0] in RELEASED:
        return {}
    return {"code": fingerprint(thing)}


def counts(value: Any) -> Iterator[tuple[str, int]]:
    """Yield the integers that a method and its guide are made with, but for a model's, seeds and batch sizes."""
    call = _call_of(value)
    for name, option in ({} if call is None else call[2]).items():
        if type(option) is int and name not in ("secret", "seed") and "batch_size" not in name:
            yield name, option
        elif name != "model":
            yield from counts(option)


# ----------------------------------------------------------------------------------------------
# remaking
class Handed(NamedTuple):
    """Options that are handed to a method, and to each that it is made of, and which of them were `used`."""

    options: Mapping[str, Any]
    used: set[str]


def remake(description: JSON, *, handed: Mapping[str, Any] | None = None) -> Any:
    """Make again what `describe` described, from untrusted JSON; options that are `handed` must match it."""
    options = Handed(handed or {}, set())
    made = _remade(description, "", options)
    for name in options.options:
        _require(name in options.used, f"the record has no {name} to pass: leave {name}= out")
    return made


def _remade(description: JSON, place: str, handed: Handed) -> Any:
    """Make again a description that stands at an option of the call around it."""
    if description is None or isinstance(description, bool | int | float | str):
        return description
    form = set(description) - {"code"} if isinstance(description, dict) else None
    is_one = form in FORMS and not ("code" in description and form & VALUES)
    _require(is_one, f"{_short(description)} is not a recipe of hierfl: {HAND_IN}")
    if "tensor" in description:
        return _tensor(description)
    if "mapping" in description:
        description_of = _checked(description, "mapping", dict)
        return {k: _remade(v, "", handed) for k, v in description_of.items()}
    if "sequence" in description:
        return tuple(_remade(v, "", handed) for v in _checked(description, "sequence", list))
    if "with" in description:
        return _called(description, place, handed)
    return _found(description, place)


def _found(description: dict[str, Any], place: str) -> Any:
    """Return what a description names: something public, or something marked where it may stand."""
    if "opaque" in description:
        what = _short(_checked(description, "opaque", str))
        raise CannotRemake(f"a {what} is not stored in a file; {_fix(place)}")
    name = _checked(description, "named" if "named" in description else "marked", str)
    if "named" in description and _is_public(name):
        return find(name)
    kind = KINDS.get(place)
    builder = None if kind is None else marked(kind, name)
    if builder is None:
        what = f"marked in this program as a {kind}" if kind else "a public name of hierfl"
        raise CannotRemake(f"{_short(name)} is not {what}: {_fix(place)}")
    _check_same(description, builder, place, f"the {place} marked as {_short(name)}")
    return builder


def _called(description: dict[str, Any], place: str, handed: Handed) -> Any:
    form = "made_by" if "made_by" in description else "family"
    name, given = _checked(description, form, str), _checked(description, "with", dict)
    factory = _factory(name, form, place)
    of_method = name.startswith(("hierfl.methods.", "hierfl.Method"))
    options, takes = {}, getattr(inspect.unwrap(factory), "__annotations__", {})
    for key, value in given.items():
        if takes.get(key) in COUNTS:
            is_count = isinstance(value, int) and ("seed" in key or 0 <= value < MOST)
            why = f"{_short(key)} is {_short(value)}, not a count below {MOST:,}: {HAND_IN}"
            _require(is_count or value is None, why)
        if of_method and key in handed.options:
            options[key] = handed.options[key]
            handed.used.add(key)
            _check_same(value, options[key], key, f"the {key} that was passed")
        else:
            options[key] = _remade(value, key if of_method else "", handed)
    if isinstance(factory, type) and issubclass(factory, torch.distributions.Distribution):
        options = {k: v for k, v in options.items() if SAME_PARAMETER.get(k) not in options}
    try:
        return factory(**options)
    except CannotRemake:
        raise
    except Exception as error:  # whatever a constructor raises at arguments that are not checked
        raise CannotRemake(
            f"{_short(name)} does not take what the recipe holds ({_short(error)}): {HAND_IN}"
        ) from error


def _factory(name: str, form: str, place: str) -> Any:
    """Return what a description may call: a public factory or a marked guide, which only makes a value."""
    if form == "family" and not _is_public(name) and place == "guide":
        factory = marked("guide", name)
    else:
        factory = find(name)
    is_family = isinstance(factory, Family)
    _require(form != "family" or is_family, f"{_short(name)} is not a guide family: {_fix(place)}")
    is_guide = place != "guide" or not name.startswith("hierfl.models.")
    # what it observed would be a likelihood of the recipe's choice
    _require(is_guide, f"{_short(name)} is a model, not a guide: {_fix(place)}")
    makes = getattr(factory, "__recorded__", False) is True
    if isinstance(factory, type):
        makes = is_dataclass(factory) or issubclass(factory, torch.distributions.Distribution)
    _require(
        form != "made_by" or makes,
        f"{_short(name)} is neither a recorded factory nor a dataclass nor a distribution: {HAND_IN}",
    )
    return factory


def _is_public(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return exported(module, last) is not None


def _check_same(description: JSON, value: object, place: str, what: str) -> None:
    differs = differences(description, describe(value), place).differs
    _require(
        not differs,
        f"{what} is not the recorded one: it differs in {', '.join(differs[:3])}; "
        "load with the program that was fitted",
    )


def _fix(place: str) -> str:
    if place in KINDS:
        return f"mark it in this program, @hierfl.{place}, or pass it: load(..., {place}=...)"
    return HAND_IN


def _tensor(description: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, _checked(description, "dtype", str), None)
    is_dtype = isinstance(dtype, torch.dtype)
    _require(is_dtype, f"{_short(description['dtype'])} is not a dtype of torch: {HAND_IN}")
    try:
        return torch.tensor(description["tensor"], dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CannotRemake(f"{_short(description)} is not a tensor ({error}): {HAND_IN}") from error


def _checked(description: dict[str, Any], key: str, kind: type) -> Any:
    value = description[key]
    fits = isinstance(value, kind)
    _require(fits, f"'{key}' of a recipe is {_short(value)}, not a {kind.__name__}: {HAND_IN}")
    return value


def _require(holds: bool, message: str) -> None:
    """Refuse a record of which something does not hold."""
    if not holds:
        raise CannotRemake(message)


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Differences(NamedTuple):
    """What is different, and what cannot be compared, in words."""

    differs: list[str]
    unknown: list[str]


def differences(there: Any, here: Any, where: str = "") -> Differences:
    """Compare two descriptions, functions by their fingerprints where both have one."""
    found_in = list(_compared(there, here, where))
    return Differences([t for sure, t in found_in if sure], [t for sure, t in found_in if not sure])


def _compared(there: Any, here: Any, where: str) -> Iterator[tuple[bool, str]]:
    """Yield (True, a difference) or (False, what cannot be compared)."""
    if not isinstance(here, Mapping) or not isinstance(there, Mapping):
        if _text(there) != _text(here):
            yield True, f"{where or 'kind'}: {_short_text(there)} there, {_short_text(here)} here"
        return
    if (
        "sequence" in here
        and isinstance(there.get("sequence"), list)
        and len(there["sequence"]) == len(here["sequence"])
    ):
        for i, pair in enumerate(zip(there["sequence"], here["sequence"], strict=True)):
            yield from _compared(*pair, f"{where}[{i}]")
        return
    if isinstance(here.get("code"), Mapping) or isinstance(there.get("code"), Mapping):
        yield from _compared_by_code(there, here, where)
    elif _text(_name_of(there)) != _text(_name_of(here)):
        values = f"{_named(there)} there, {_named(here)} here"
        yield True, f"{where}: {values}" if where else values
        return
    for key in ("with", "mapping"):
        first, second = there.get(key), here.get(key)
        if not isinstance(first, Mapping) or not isinstance(second, Mapping):
            yield from _compared(first, second, where)
            continue
        for name in {**first, **second}:
            yield from _compared(first.get(name), second.get(name), f"{where} {name}".strip())


def _compared_by_code(
    there: Mapping[str, Any], here: Mapping[str, Any], where: str
) -> Iterator[tuple[bool, str]]:
    first, second, what = there.get("code"), here.get("code"), where or "method"
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        if _text(_name_of(there)) != _text(_name_of(here)):
            yield (
                True,
                f"{what}: {_short_text(_name_of(there))} there, {_short_text(_name_of(here))} here",
            )
        else:
            yield True, f"{what}: one of the two does not say what its code is"
        return
    for part in differing(first, second):
        yield True, f"{what}: {part}"
    if first.get(PYTHON) != second.get(PYTHON):
        yield (
            False,
            f"{what}: its code was compiled by {_short_text(first.get(PYTHON))} there, by "
            f"{_short_text(second.get(PYTHON))} here",
        )


def _name_of(description: Mapping[str, Any]) -> Any:
    """Return a description without its options and its fingerprint."""
    return {k: v for k, v in description.items() if k not in ("with", "mapping", "code")}


def _named(description: Mapping[str, Any]) -> str:
    """Return what a description calls or names, in words; of one's own `Method` also its name."""
    name = _name_of(description)
    text = next(iter(name.values())) if len(name) == 1 else name
    if not isinstance(text, str):
        return _short_text(name)
    options = description.get("with")
    own = options.get("name") if text == "hierfl.Method" and isinstance(options, Mapping) else None
    return f"{text} '{own}'" if isinstance(own, str) else text


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)  # NaN equals NaN in it


def _short_text(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
