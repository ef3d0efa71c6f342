"""What a run's record says, checked and compared, as it may be crafted; private hashes are salted."""

import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict, TypeVar

import msgspec
import torch

from hierfl.data.absent import is_absent
from hierfl.data.clients import ClientData
from hierfl.engine.client_store import CheckpointError
from hierfl.engine.federation import Federation
from hierfl.method import Method
from hierfl.program.recipes import describe, differences

T = TypeVar("T")
LARGEST = 1 << 30  # bytes of a JSON file that is read: a million rounds, or ten million clients
DEEPEST = 100  # levels of nested lists and objects; a description of a method has about 20


def read_json(path: Path) -> Any:
    """Read a JSON file that need not be trusted: a plain file, not too large or too deep."""
    try:
        if not path.is_file():  # reading a pipe would wait for ever
            raise OSError("there is no such file")
        if path.stat().st_size > LARGEST:
            raise OSError(f"it has more than {LARGEST} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
        if not _is_shallow(value, DEEPEST):
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read ({error})") from error
    return value


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Scalar = bool | int | float | str | None


class Identity(TypedDict):
    """What identifies a run; the hashes of its clients and rows are salted on disk."""

    method: dict[str, Any]
    rounds: Count
    seed: int
    cohort: Count
    clients: str
    rows: NotRequired[str]
    fields: dict[str, list[Any]]
    engine: NotRequired[Literal["vectorized", "sequential"]]
    device: NotRequired[str]
    salt: NotRequired[str]


class Record(msgspec.Struct, frozen=True):
    """The `state.json` of a checkpoint: where a run stands, hashes of its other files, and what run it is."""

    round: Count
    compiled: bool
    history: tuple[dict[str, Scalar | list[dict[str, Scalar]]], ...]
    chosen: str | None
    verdict: str | None
    corrected: bool
    ended: str | None
    one_mode: bool
    hashes: dict[str, str]
    about: Identity

    def __post_init__(self) -> None:
        """Refuse a record without the hashes of its two files."""
        if not {"global", "local"} <= self.hashes.keys() or "rows" not in self.about:
            raise ValueError("a hash is missing")


class FitRecord(TypedDict):
    """The `fit.json` of a saved fit: what its data look like, and what its program starts from."""

    names: list[str]
    counts: list[Count]
    client_column: str
    fields: dict[str, list[Any]]
    client_fields: dict[str, list[Any]]
    features: dict[str, list[str]]
    levels: dict[str, list[str]]
    start: str
    dtype: str
    sites: dict[str, str]


def typed(kind: type[T], value: Any, file: str) -> T:
    """Return what a file holds as a `Record` or a `FitRecord`, if `save` can have written it."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{file} does not belong to a hierfl run: {error}") from error


def digest(record: Mapping[str, Any]) -> str:
    """Return the hash of a record, which stands beside it as its entry `sha256`."""
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def _is_shallow(value: Any, levels: int) -> bool:
    """Return whether a value is nested at most so many levels deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not inner or (levels > 0 and all(_is_shallow(v, levels - 1) for v in inner))


# hashes of the clients' names and rows: whoever has a guess can confirm it by an unsalted hash
PRIVATE = ("clients", "rows")
# how the numbers were computed: two fits that differ in nothing else are still the same run
HOW = ("engine", "device")


def about(method: Method, federation: Federation, rounds: int) -> dict[str, Any]:
    """Return what identifies a run, as JSON; `sealed` salts its private hashes for the disk."""
    settings = {"engine": federation.settings.engine, "device": federation.device.type}
    run = {"method": describe(method), "rounds": rounds, "seed": federation.seed, **settings}
    return {**run, "cohort": federation.cohort, **about_data(federation.data)}


def about_data(data: ClientData) -> dict[str, Any]:
    """Return what identifies the data of a run; rows that are not there are left out."""
    names = hashlib.sha256("\n".join(data.names).encode()).hexdigest()
    fields = {**data.fields, **data.client_fields}
    forms = {name: [str(v.dtype), *v.shape[1:]] for name, v in fields.items()}
    described = {"clients": names, "fields": forms}
    if is_absent(data):
        return described
    hashed = hashlib.sha256()  # of the contents, which tell two splits of the same rows apart
    own = [of[name] for of in (data.fields, data.client_fields) for name in sorted(of)]
    for values in (data.counts, *own):
        hashed.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {**described, "rows": hashed.hexdigest()}


def sealed(about: Mapping[str, Any], salt: str | None = None) -> dict[str, Any]:
    """Return what identifies a run as it is written to disk: private hashes are salted, unless by ""."""
    run: dict[str, Any] = json.loads(json.dumps(about))
    salt = secrets.token_hex(16) if salt is None else salt
    for key in PRIVATE if salt else ():
        if key in run:
            run[key] = hashlib.sha256(f"{salt}{run[key]}".encode()).hexdigest()
    return {**run, "salt": salt} if salt else run


class Difference(NamedTuple):
    """In what two runs differ, by name, in words; and what cannot be compared, in words."""

    differs: dict[str, str]
    unknown: list[str]

    @property
    def in_words(self) -> str:
        """The first three things in which they differ, in words; "" where they are the same run."""
        return "; ".join([*self.differs.values()][:3])


def compared(record: Mapping[str, Any], about: Mapping[str, Any]) -> Difference:
    """Compare a run on disk with another; private entries are only said to differ."""
    salt = record.get("salt")
    here = sealed(about, salt if isinstance(salt, str) else "")
    method = differences(record.get("method"), here.pop("method", record.get("method")))
    differs = {"method": f"method ({'; '.join(method.differs[:3])})"} if method.differs else {}
    for key in sorted(here.keys() - {"salt"}):
        there = record.get(key)
        if there == here[key]:
            continue
        values = f"{_short(there)} there, {_short(here[key])} here"
        differs[key] = f"{key} ({key}: {'others there than here' if key in PRIVATE else values})"
    return Difference(differs, method.unknown)


def is_of(record: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Return whether a run on disk is the given one, however its numbers were computed."""
    return not compared(record, about).differs.keys() - set(HOW)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else text[:197] + "..."
