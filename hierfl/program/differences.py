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


def differences(found: JSON, wanted: JSON, where: str = "") -> Differences:
    """Compare two descriptions, functions by their fingerprints where both have one."""
    found_in = list(_compared(found, wanted, where))
    return Differences([t for sure, t in found_in if sure], [t for sure, t in found_in if not sure])


def _compared(found: JSON, wanted: JSON, where: str) -> Iterator[tuple[bool, str]]:
    """Yield (True, a difference) or (False, what cannot be compared)."""
    if not isinstance(wanted, Mapping) or not isinstance(found, Mapping):
        if _text(found) != _text(wanted):
            yield True, f"{where or 'kind'}: {_short(found)} there, {_short(wanted)} here"
        return
    if (
        "sequence" in wanted
        and isinstance(found.get("sequence"), list)
        and len(found["sequence"]) == len(wanted["sequence"])
    ):
        for i, pair in enumerate(zip(found["sequence"], wanted["sequence"], strict=True)):
            yield from _compared(*pair, f"{where}[{i}]")
        return
    if isinstance(wanted.get("code"), Mapping) or isinstance(found.get("code"), Mapping):
        yield from _compared_by_code(found, wanted, where)
    elif _text(_name_of(found)) != _text(_name_of(wanted)):
        both = f"{_named(found)} there, {_named(wanted)} here"
        yield True, f"{where}: {both}" if where else both
        return
    for key in ("with", "mapping"):
        yield from _compared_by_key(found.get(key), wanted.get(key), where)


def _compared_by_key(found: JSON, wanted: JSON, where: str) -> Iterator[tuple[bool, str]]:
    if not isinstance(found, Mapping) or not isinstance(wanted, Mapping):
        if _text(found) != _text(wanted):
            yield True, f"{where or 'kind'}: {_short(found)} there, {_short(wanted)} here"
        return
    for name in {**found, **wanted}:
        yield from _compared(found.get(name), wanted.get(name), f"{where} {name}".strip())


def _compared_by_code(
    found: Mapping[str, Any], wanted: Mapping[str, Any], where: str
) -> Iterator[tuple[bool, str]]:
    one, two, what = found.get("code"), wanted.get("code"), where or "method"
    if not isinstance(one, Mapping) or not isinstance(two, Mapping):
        if _text(_name_of(found)) != _text(_name_of(wanted)):
            yield True, f"{what}: {_short(_name_of(found))} there, {_short(_name_of(wanted))} here"
        else:
            yield True, f"{what}: one of the two does not say what its code is"
        return
    for part in differing(one, two):
        yield True, f"{what}: {part}"
    if one.get(PYTHON) != two.get(PYTHON):
        yield (
            False,
            f"{what}: its code was compiled by {_short(one.get(PYTHON))} there, by "
            f"{_short(two.get(PYTHON))} here",
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
