"""What a run's record says, checked and compared, as it may be crafted; private hashes are salted."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hierfl.data.absent import is_absent
from hierfl.data.clients import ClientData
from hierfl.engine.client_store import CheckpointError
from hierfl.engine.federation import Federation
from hierfl.method import Method
from hierfl.program.differences import differences
from hierfl.program.recipes import describe

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


def _is_history(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, dict) and all(map(_is_entry, row.values())) for row in value
    )


def _is_entry(value: Any) -> bool:
    """Return whether a value is a scalar or words, or a list of records of such."""
    if isinstance(value, list):
        return all(isinstance(one, dict) and _is_history([one]) for one in value)
    return isinstance(value, int | float | str | None)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


_is_text = _is(str)
RECORD: dict[str, Callable[[Any], bool]] = {
    "round": _is_count,
    "compiled": _is(bool),
    "hashes": lambda value: (
        isinstance(value, dict) and all(_is_text(value.get(key)) for key in ("global", "local"))
    ),
    "about": _is(dict),
    "history": _is_history,
}
ABOUT = {"method": _is(dict), "rounds": _is_count, "seed": _is(int), "cohort": _is_count}
ABOUT |= {"clients": _is_text, "rows": _is_text, "fields": _is(dict)}
SCHEMA: dict[str, Callable[[Any], bool]] = {
    "names": _are_words,
    "features": lambda value: isinstance(value, dict) and all(map(_are_words, value.values())),
}
SCHEMA["levels"] = SCHEMA["features"]
SCHEMA["sites"] = lambda value: isinstance(value, dict) and all(map(_is_text, value.values()))


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


# hashes of the clients' names and rows: whoever has a guess can confirm it by an unsalted hash
PRIVATE = ("clients", "rows")
# how the numbers were computed: two fits that differ in nothing else are still the same run
HOW = ("engine", "device")

JSON = Any


def about(method: Method, federation: Federation, rounds: int) -> dict[str, Any]:
    """Return what identifies a run, as JSON; `sealed` salts its private hashes for the disk."""
    settings = {"engine": federation.settings.engine, "device": federation.device.type}
    run = {"method": describe(method), "rounds": rounds, "seed": federation.seed, **settings}
    return {**run, "cohort": federation.cohort, **about_data(federation.data)}


def about_data(data: ClientData) -> dict[str, Any]:
    """Return what identifies the data of a run; rows that are not there are left out."""
    names = hashlib.sha256("\n".join(data.names).encode()).hexdigest()
    known = {**data.fields, **data.client_fields}
    forms = {name: [str(v.dtype), *v.shape[1:]] for name, v in known.items()}
    found = {"clients": names, "fields": forms}
    if is_absent(data):
        return found
    hashed = hashlib.sha256()  # of the contents, which tell two splits of the same rows apart
    own = [of[name] for of in (data.fields, data.client_fields) for name in sorted(of)]
    for values in (data.counts, *own):
        hashed.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {**found, "rows": hashed.hexdigest()}


def sealed(about: Mapping[str, Any]) -> dict[str, JSON]:
    """Return what identifies a run as it is written to disk: private hashes are salted."""
    return _sealed(about, secrets.token_hex(16))


def _sealed(about: Mapping[str, Any], salt: str | None) -> dict[str, JSON]:
    found: dict[str, JSON] = json.loads(json.dumps(about))
    if not salt:
        return found
    private = {
        k: hashlib.sha256(f"{salt}{found[k]}".encode()).hexdigest() for k in PRIVATE if k in found
    }
    return {**found, **private, "salt": salt}


class Compared(NamedTuple):
    """In what two runs differ, by name, in words; and what cannot be compared, in words."""

    differs: dict[str, str]
    unknown: list[str]

    @property
    def difference(self) -> str:
        """The first three things in which they differ, in words; "" where they are the same run."""
        return "; ".join([*self.differs.values()][:3])


def compared(record: Mapping[str, Any], about: Mapping[str, Any]) -> Compared:
    """Compare a run on disk with another; private entries are only said to differ."""
    salt = record.get("salt")
    here = _sealed(about, salt if isinstance(salt, str) else None)
    method = differences(record.get("method"), here.pop("method", record.get("method")))
    differs = {"method": f"method ({'; '.join(method.differs[:3])})"} if method.differs else {}
    for key in sorted(here.keys() - {"salt"}):
        there = record.get(key)
        if there == here[key]:
            continue
        both = f"{_short(there)} there, {_short(here[key])} here"
        differs[key] = f"{key} ({key}: {'others there than here' if key in PRIVATE else both})"
    return Compared(differs, method.unknown)


def is_of(record: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Return whether a run on disk is the given one, however its numbers were computed."""
    return not compared(record, about).differs.keys() - set(HOW)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else text[:197] + "..."
