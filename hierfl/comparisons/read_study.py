"""Reads study files, and says what is wrong with one: every key, with the nearest known one."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from hierfl.comparisons.study_file import Study, nearest


def read(path: str | Path, *, quick: bool = False) -> Study:
    """Return the study that a file declares.

    Args:
        path: of the TOML file.
        quick: with the changes of its table `[quick]`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no TOML, or no study; the message names each key and the mend.
    """
    file = Path(path)
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no TOML file: {error}") from error
    changes = given.pop("quick", {})
    try:
        study = Study.model_validate(given)
        return Study.model_validate(changed(given, changes)) if quick else study
    except ValidationError as error:
        lines = "\n".join(f"  {line}" for line in _told(error))
        raise ValueError(f"{file} is no study:\n{lines}") from error


def changed(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with the keys of others in their place, table by table."""
    found = dict(given)
    for key, value in changes.items():
        below = found.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        found[key] = changed(below, value) if both else value  # type: ignore[arg-type]
    return found


def _told(error: ValidationError) -> Iterator[str]:
    """Yield one line for each thing that is wrong."""
    for one in error.errors():
        place = ".".join(str(part) for part in one["loc"])
        if one["type"] == "extra_forbidden":
            known = _keys_at(one["loc"][:-1])
            mend = nearest(str(one["loc"][-1]), known) or f"; known: {', '.join(known)}"
            yield f"{place}: unknown key{mend}"
        else:
            message = one["msg"].removeprefix("Value error, ")
            shown = (
                "" if one["type"] in ("missing", "value_error") else f" (it is {one['input']!r})"
            )
            yield f"{place}: {message}{shown}" if place else f"{message}{shown}"


def _keys_at(place: tuple[int | str, ...]) -> list[str]:
    """Return the known keys of the table at a place of the file."""
    table: type[BaseModel] = Study
    for part in place:
        if isinstance(part, str) and part in table.model_fields:
            kinds = [table.model_fields[part].annotation]
            while kinds:
                kind = kinds.pop()
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    table = kind
                kinds += get_args(kind)
    return list(table.model_fields)
