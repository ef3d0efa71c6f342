"""What a record on disk must look like before it is used: a file may be damaged, or crafted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hierfl.engine.client_store import CheckpointError

LARGEST = 1 << 30  # bytes of a JSON file that is read: a million rounds, or ten million clients
DEEPEST = 100  # levels of nested lists and objects; a description of a method has about 20


def read_json(path: Path) -> Any:
    """Read a JSON file that need not be trusted: a plain file, not too large or too deep."""
    try:
        if not path.is_file():  # reading a pipe would wait for ever
            raise OSError("there is no such file")
        if path.stat().st_size > LARGEST:
            raise OSError(f"it has more than {LARGEST} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
        if not _is_shallow(found, DEEPEST):
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read ({error})") from error
    return found


def check_record(record: Mapping[str, Any]) -> None:
    """Refuse the record of a checkpoint with an entry missing, or not as `save` writes it."""
    _check(record, "state.json", RECORD)
    _check(record["about"], "state.json", ABOUT)


def checked_schema(schema: Any) -> dict[str, Any]:
    """Return what `fit.json` says of the data of a saved fit, if `save` can have written it."""
    _check(schema if isinstance(schema, dict) else {}, "fit.json", SCHEMA)
    return dict(schema)


def digest(record: Mapping[str, Any]) -> str:
    """Return the hash of a record, which stands beside it as its entry `sha256`."""
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_history(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, dict) and all(map(_is_entry, row.values())) for row in value
    )


def _is_entry(value: Any) -> bool:
    """Return whether a value is a scalar or words, or a list of records of such."""
    if isinstance(value, list):
        return all(isinstance(one, dict) and _is_history([one]) for one in value)
    return isinstance(value, int | float | str | None)


def _are_hashes(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("global", "local")
    )


RECORD: dict[str, Callable[[Any], bool]] = {
    "round": _is_count,
    "compiled": lambda value: isinstance(value, bool),
    "hashes": _are_hashes,
    "about": lambda value: isinstance(value, dict),
    "history": _is_history,
}
ABOUT: dict[str, Callable[[Any], bool]] = {
    "method": lambda value: isinstance(value, dict),
    "rounds": _is_count,
    "seed": _is_whole,
    "cohort": _is_count,
    "clients": lambda value: isinstance(value, str),
    "rows": lambda value: isinstance(value, str),
    "fields": lambda value: isinstance(value, dict),
}
SCHEMA: dict[str, Callable[[Any], bool]] = {
    "names": _are_words,
    "features": lambda value: isinstance(value, dict) and all(map(_are_words, value.values())),
    "levels": lambda value: isinstance(value, dict) and all(map(_are_words, value.values())),
}


def _check(
    record: Mapping[str, Any], file: str, entries: Mapping[str, Callable[[Any], bool]]
) -> None:
    for name, is_right in entries.items():
        if name not in record or not is_right(record[name]):
            found = json.dumps(record[name])[:80] if name in record else "missing"
            raise CheckpointError(f"{file} is not of a hierfl run: its entry '{name}' is {found}")


def _is_shallow(value: Any, left: int) -> bool:
    """Return whether a value is nested at most `left` levels deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not inner or (left > 0 and all(_is_shallow(v, left - 1) for v in inner))
