"""Damage and forgery of files.

Bytes that flip, JSON of another structure, and what watches for code that runs.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

JSON = Any

# Values of other types and of absurd sizes.
STRANGE: tuple[JSON, ...] = (
    None,
    True,
    0,
    -1,
    1,
    1 << 40,
    -(1 << 70),
    10**300,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "a",
    "\ud800",
    "../../etc/passwd",
    "x" * 10_000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"made_by": "os:system", "with": {"command": "touch ran"}},
    {"named": "os:system"},
    {"opaque": "builtins.function"},
    {"tensor": [1.0], "dtype": "float64"},
)
# Audit events of the interpreter that no `load` may cause.
EVENTS = (
    "os.exec os.fork os.forkpty os.kill os.mkdir os.posix_spawn os.putenv os.remove os.rename "
    "os.rmdir os.spawn os.symlink os.system os.truncate pickle.find_class shutil. socket. "
    "subprocess.Popen urllib.Request webbrowser."
).split()
_seen: list[str] | None = None


def flipped(content: bytes, how: random.Random) -> bytes:
    """Return content with one to three bytes changed, cut off at a random place, or grown."""
    kind = how.choice(["flip", "flip", "flip", "cut", "empty", "grow", "zeros"])
    changed = bytearray(content)
    if kind == "flip" and content:
        for _ in range(how.randint(1, 3)):
            changed[how.randrange(len(changed))] ^= 1 << how.randrange(8)
    elif kind == "cut":
        del changed[how.randrange(len(changed) + 1) :]
    elif kind == "grow":
        changed += how.randbytes(how.randint(1, 40))
    elif kind == "zeros" and content:
        at = how.randrange(len(changed))
        changed[at : at + 64] = bytes(len(changed[at : at + 64]))
    else:
        changed.clear()
    return bytes(changed)


def mutated(value: JSON, how: random.Random) -> JSON:
    """Return JSON with one entry somewhere removed, added, renamed, doubled, nested, or of another type."""
    whole = copy.deepcopy(value)
    places = list(_places(whole))
    if not places:
        return how.choice(STRANGE)
    parent, key = how.choice(places)
    kind = how.choice(["strange", "strange", "remove", "add", "swap", "nest"])
    if kind == "remove":
        del parent[key]
    elif kind == "add" and isinstance(parent, dict):
        parent[how.choice(["a", "with", "made_by", "named", "code", "__class__"])] = how.choice(
            STRANGE
        )
    elif kind == "swap":
        other, place = how.choice(places)
        parent[key] = copy.deepcopy(other[place]) if place in range_of(other) else None
    elif kind == "nest":
        for _ in range(how.choice([1, 3, 200])):
            parent[key] = [parent[key]]
    else:
        parent[key] = how.choice(STRANGE)
    return whole


def range_of(parent: JSON) -> Any:
    """Return the keys or places of a dict or list."""
    return parent.keys() if isinstance(parent, dict) else range(len(parent))


def _places(value: JSON) -> Iterator[tuple[Any, Any]]:
    """Yield every entry of nested JSON, as its parent and its key."""
    if isinstance(value, dict | list):
        for key in range_of(value):
            yield value, key
            yield from _places(value[key])


@contextmanager
def watched() -> Iterator[list[str]]:
    """Note what the interpreter does meanwhile that a reader of files must not.

    Processes, deletions, writes.
    """
    global _seen
    if not getattr(sys, "_hierfl_watches", False):
        sys.addaudithook(_note)  # it cannot be removed again
        sys._hierfl_watches = True  # type: ignore[attr-defined]
    found: list[str] = []
    _seen = found
    try:
        yield found
    finally:
        _seen = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if writes or any(event.startswith(word) for word in EVENTS):
        _seen.append(f"{event} {arguments!r}"[:200])
