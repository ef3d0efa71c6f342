"""What identifies a run in its record, and how two of them are compared. Hashes of private things are salted."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

from hierfl.program.recipes import translated

# hashes of the clients' names and rows: whoever has a guess can confirm it by an unsalted hash
PRIVATE = ("clients", "rows")
# what records of earlier releases do not hold
LATER = ("engine", "device")
# how the numbers were computed: two fits that differ in nothing else are still the same run
HOW = ("engine", "device")

JSON = Any


def sealed(about: Mapping[str, Any]) -> dict[str, JSON]:
    """Return what identifies a run as it is written to disk: private hashes are salted, with the salt beside.

    Args:
        about: what identifies the run (`hierfl.engine.federation.about`).
    """
    return _sealed(about, secrets.token_hex(16))


def _sealed(about: Mapping[str, Any], salt: str | None) -> dict[str, JSON]:
    found: dict[str, JSON] = json.loads(json.dumps(about))
    if not salt:
        return found
    private = {
        k: hashlib.sha256(f"{salt}{found[k]}".encode()).hexdigest() for k in PRIVATE if k in found
    }
    return {**found, **private, "salt": salt}


def differing(record: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs between a run on disk and another.

    Args:
        record: what identifies the run on disk, as `sealed` returned it, or as earlier releases wrote it.
        about: what identifies the other, or a part of that.
    """
    salt = record.get("salt")
    there, here = _as_now(record), _as_now(_sealed(about, salt if isinstance(salt, str) else None))
    return [
        key
        for key in here
        if there.get(key) != here[key] and not (key in LATER and key not in there)
    ]


def is_of(record: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Return whether a run on disk is the given one, however its numbers were computed."""
    return not set(differing(record, about)) - set(HOW)


def told(record: Mapping[str, Any], about: Mapping[str, Any], differ: list[str]) -> str:
    """Say in words how two runs differ; of private things, only that they do.

    Args:
        record: of the run on disk.
        about: of the other.
        differ: what differs, at least one.
    """
    first = differ[0]
    both = (
        "others there than here"
        if first in PRIVATE
        else f"{_short(_as_now(record).get(first))} there, {_short(_as_now(about)[first])} here"
    )
    return f"{', '.join(differ)} ({first}: {both})"


def _as_now(about: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the method in a run's identity to the names of this release."""
    return {k: translated(v) if k == "method" else v for k, v in about.items()}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else text[:197] + "..."
