"""JSON from elsewhere, read as a dataclass or another type: every field there, none besides, all finite."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
CountOrFew = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 40)]  # -1: too few to be told
Number = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
# of values of any unit, whose squares are numbers, and their sd
Value = Annotated[float, msgspec.Meta(ge=-1e150, le=1e150)]
Spread = Annotated[float, msgspec.Meta(ge=0.0, le=1e150)]
MOST = 1 << 26  # characters


def read_as(kind: type[T] | Any, content: bytes | str, *, most: int = MOST) -> T:
    """Return what JSON holds, of a type; raise ValueError, whose text has no value of a field."""
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} characters")
    try:
        return made_of(kind, msgspec.json.decode(content))
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}"[:300]) from error


def made_of(kind: type[T] | Any, value: Any) -> T:
    """Return a value of a type, of JSON's dicts and lists; raise ValueError where a field is missing or unknown."""
    try:
        made: T = msgspec.convert(value, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}"[:300]) from error
    if made is not value and _plain(made) != _plain(value):
        raise ValueError("it lacks fields, or has some that are not known")
    return made


def written(made: Any) -> str:
    """Return a dataclass, or what holds some, as JSON of finite numbers alone."""
    return json.dumps(_plain(made), allow_nan=False)


def _plain(found: Any) -> Any:
    """Return the values that JSON has of dataclasses, tuples and sets, which are sorted."""
    if is_dataclass(found) and not isinstance(found, type):
        return {part.name: _plain(getattr(found, part.name)) for part in fields(found)}
    if isinstance(found, Mapping):
        return {key: _plain(value) for key, value in found.items()}
    if isinstance(found, set | frozenset):
        return sorted(found)
    return [*map(_plain, found)] if isinstance(found, list | tuple) else found
