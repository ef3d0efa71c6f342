"""How two descriptions of methods (`hierfl.program.recipes.describe`) differ, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hierfl.program.fingerprints import PYTHON, differing

JSON = Any


class Differences(NamedTuple):
    """What is different, and what cannot be compared, in words."""

    differs: list[str]
    unknown: list[str]


def differences(there: JSON, here: JSON, where: str = "") -> Differences:
    """Compare two descriptions, functions by their fingerprints where both have one."""
    found_in = list(_compared(there, here, where))
    return Differences([t for sure, t in found_in if sure], [t for sure, t in found_in if not sure])


def _compared(there: JSON, here: JSON, where: str) -> Iterator[tuple[bool, str]]:
    """Yield (True, a difference) or (False, what cannot be compared)."""
    if not isinstance(here, Mapping) or not isinstance(there, Mapping):
        if _text(there) != _text(here):
            yield True, f"{where or 'kind'}: {_short(there)} there, {_short(here)} here"
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
            yield True, f"{what}: {_short(_name_of(there))} there, {_short(_name_of(here))} here"
        else:
            yield True, f"{what}: one of the two does not say what its code is"
        return
    for part in differing(first, second):
        yield True, f"{what}: {part}"
    if first.get(PYTHON) != second.get(PYTHON):
        yield (
            False,
            f"{what}: its code was compiled by {_short(first.get(PYTHON))} there, by "
            f"{_short(second.get(PYTHON))} here",
        )


def _name_of(description: Mapping[str, Any]) -> JSON:
    """Return a description without its options and its fingerprint."""
    return {k: v for k, v in description.items() if k not in ("with", "mapping", "code")}


def _named(description: Mapping[str, Any]) -> str:
    """Return what a description calls or names, in words; of one's own `Method` also its name."""
    name = _name_of(description)
    text = next(iter(name.values())) if len(name) == 1 else name
    if not isinstance(text, str):
        return _short(name)
    options = description.get("with")
    own = options.get("name") if text == "hierfl.Method" and isinstance(options, Mapping) else None
    return f"{text} '{own}'" if isinstance(own, str) else text


def _text(value: JSON) -> str:
    return json.dumps(value, sort_keys=True)  # NaN equals NaN in it


def _short(value: JSON) -> str:
    text = _text(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
