"""What identifies a run in its record; hashes of private data are salted."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hierfl.data.absent import is_absent
from hierfl.data.clients import ClientData
from hierfl.engine.federation import Federation
from hierfl.method import Method
from hierfl.program.differences import differences
from hierfl.program.recipes import describe

# hashes of the clients' names and rows: whoever has a guess can confirm it by an unsalted hash
PRIVATE = ("clients", "rows")
# how the numbers were computed: two fits that differ in nothing else are still the same run
HOW = ("engine", "device")

JSON = Any


def about(method: Method, federation: Federation, rounds: int) -> dict[str, Any]:
    """Return what identifies a run, as JSON; `sealed` salts its private hashes for the disk."""
    return {
        "method": describe(method),
        "rounds": rounds,
        "seed": federation.seed,
        "engine": federation.settings.engine,
        "device": federation.device.type,
        "cohort": federation.cohort,
        **about_data(federation.data),
    }


def about_data(data: ClientData) -> dict[str, Any]:
    """Return what identifies the data of a run; rows that are not there are left out."""
    found = {
        "clients": hashlib.sha256("\n".join(data.names).encode()).hexdigest(),
        "fields": {
            name: [str(v.dtype), *v.shape[1:]]
            for name, v in {**data.fields, **data.client_fields}.items()
        },
    }
    if is_absent(data):
        return found
    rows = [data.counts, *_by_name(data.fields), *_by_name(data.client_fields)]
    return {**found, "rows": _digest(rows)}


def _by_name(fields: Mapping[str, Tensor]) -> list[Tensor]:
    return [fields[name] for name in sorted(fields)]


def _digest(tensors: list[Tensor]) -> str:
    """Return a hash of the contents of tensors, which tells two splits of the same rows apart."""
    found = hashlib.sha256()
    for values in tensors:
        found.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


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
