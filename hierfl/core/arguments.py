"""Checks of the types of a user's arguments: counts, seeds and paths."""

from __future__ import annotations

import numbers
import os
from pathlib import Path
from typing import Any

PLAIN = (str, int, float, bool, type(None))  # kinds of which a message shows the value


def shown(value: Any) -> str:
    """Return a value for a message: as it is written where it is plain, else its kind.

    >>> shown("x"), shown(2.5), shown([1, 2])
    ("'x'", '2.5', 'a list')
    """
    kind = type(value).__name__
    if isinstance(value, PLAIN):
        return repr(value)
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"


def expect_count(value: Any, what: str, *, least: int = 1) -> int:
    """Return `value`, which must be an integer of `least` or more; `what` names it in the error."""
    number = expect_integer(value, what, f"{least} or more")
    if number < least:
        raise ValueError(f"{what} is {number}: it must be {least} or more")
    return number


def expect_integer(value: Any, what: str, which: str = "") -> int:
    """Return `value`, which must be an integer, such as a seed; else a TypeError."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    of = f" of {which}" if which else ""
    raise TypeError(f"{what} is {shown(value)}: it must be an integer{of}")


def expect_path(value: Any, what: str, like: str) -> Path:
    """Return `value` as a path; a TypeError where it is neither a string nor a path."""
    if isinstance(value, str | os.PathLike) and not isinstance(value, bytes):
        return Path(value)
    raise TypeError(f"{what} is {shown(value)}, not a path: name one, such as {like!r}")
