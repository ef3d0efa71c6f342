"""Checks that names, fields and columns are as `ClientData` needs them, and fit together."""

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hierfl.core.arguments import NoSuchName, did_you_mean

# what libraries print for a missing client; as a level of a category each is a name like any other
MISSING = frozenset({"nan", "NaN", "NaT", "<NA>", "None", "masked"})
# of `ClientBatch`: a field of such a name would be hidden by it
OF_A_BATCH = frozenset(
    "client_fields clients counts data fields is_mini_batch joint_normal key mask mean num_clients "
    "num_rows own_keys packed plate redrawn root row_scale rows shared_key sum words".split()
)
SPELLING = "case, spaces, .0 or Unicode form"
WHOLE = re.compile(r"-?\d+\.0+")  # a whole number as pandas writes one beside missing values


class RowsFault(ValueError):
    """Rows that cannot be used: a message for their owner; `public` is what a node may say of them, without values."""

    def __init__(self, message: str, public: str = "") -> None:
        super().__init__(message)
        self.public = public


class NoColumn(RowsFault, NoSuchName):
    """Rows that lack a column."""


def _faults_of_names(names: Sequence[str]) -> Iterator[str]:
    """Yield names that are missing, cannot be written, occur twice, or look like another."""
    if not names:
        yield "there are no clients: give at least one row of one client"
    different, joined = set(names), "".join(names)
    if len(different) < len(names):
        repeated = Counter(names).most_common(1)[0][0]
        yield f"two clients are named '{repeated}': client names must be unique"
    if missing := different & MISSING:
        what = f"a client is named '{min(missing)}', the word for a missing value"
        yield f"{what}: leave its rows out, or rename it"
    for name in () if joined.isprintable() else names:
        if any(unicodedata.category(c) in ("Cc", "Cs") for c in name):
            what = f"client {name!r} has a control character or an incomplete character in its name"
            yield f"{what}: rename it"
    if similar := look_alike(names):
        what = f"clients {similar[0]!r} and {similar[1]!r} differ only in {SPELLING}"
        yield f"{what}: make them one client, or rename one"
    if not all(map(str.strip, names)):
        yield "a client has an empty name: name it, or leave its rows out"


def plain_form(name: str) -> str:
    """Return what a name shares with others that look like it: case, blanks, ".0" and Unicode form set aside.

    >>> plain_form(" St. Mary") == plain_form("ST.  MARY"), plain_form("1") == plain_form("1.0")
    (True, True)
    """
    visible = "".join(c for c in name if unicodedata.category(c) != "Cf")
    folded = unicodedata.normalize("NFKD", visible).casefold()
    dashed = "".join("-" if unicodedata.category(c) == "Pd" else c for c in folded)
    plain = " ".join(unicodedata.normalize("NFKC", dashed).split())
    return plain.partition(".")[0] if WHOLE.fullmatch(plain) else plain


def look_alike(names: Sequence[str]) -> tuple[str, str] | None:
    """Return two names that differ only in case, spaces, ".0", invisible characters or Unicode form."""
    joined = "".join(names)
    if joined.isascii() and joined.isprintable() and ".0" not in joined:
        plain_text = " " not in joined and joined == joined.lower()
        if plain_text or len({" ".join(n.lower().split()) for n in names}) == len(names):
            return None
    seen: dict[str, str] = {}
    for name in names:
        plain = plain_form(name)
        if plain in seen:
            return seen[plain], name
        seen[plain] = name
    return None


def check_consistent(
    fields: Mapping[str, Tensor],
    offsets: Tensor,
    names: tuple[str, ...],
    client_fields: Mapping[str, Tensor],
    features: Mapping[str, tuple[str, ...]],
    levels: Mapping[str, tuple[str, ...]],
) -> None:
    """Refuse parts of a `ClientData` that do not fit together, with the errors it documents."""
    if not fields:
        raise ValueError("there are no fields: name at least one, such as x=... or y=...")
    if other := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"a client is named {other[0]!r}: names must be strings")
    if fault := next(_faults_of_names(names), "") or _fault_of_offsets(offsets, names):
        raise ValueError(fault)
    every = {**fields, **client_fields}
    for name, values in every.items():
        _check_field(name, values)
    for name, values in fields.items():
        check_length(name, values, int(offsets[-1]), "the clients have")
    faults = chain(
        _faults_of_client_fields(fields, client_fields, len(names)),
        _faults_of_features(fields, features),
        _faults_of_levels(every, levels),
    )
    if fault := next(faults, ""):
        raise ValueError(fault)


def field_of(fields: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a field by its name; a KeyError where there is none."""
    if name not in fields:
        raise NoSuchName(f"there is no field '{name}': the fields are {sorted(fields)}")
    return fields[name]


def check_length(name: str, values: Tensor, rows: int, what: str) -> None:
    """Refuse a field with another number of rows than `what`."""
    if len(values) != rows:
        fix = "give one value per row"
        raise ValueError(f"field '{name}' has {len(values)} rows, but {what} {rows}: {fix}")


def _fault_of_offsets(offsets: Any, names: Sequence[str]) -> str:
    is_right = isinstance(offsets, Tensor) and offsets.dtype == torch.int64
    if not is_right or offsets.shape != (len(names) + 1,) or int(offsets[0]) != 0:
        return f"offsets do not fit {len(names)} names: give a tensor of int64 from 0 on, of shape (N + 1,)"
    empty = (offsets.diff() <= 0).nonzero()
    if len(empty):
        what = f"client '{names[int(empty[0])]}' has no rows"
        return f"{what}: leave it out, or give it at least one"
    return ""


def _check_field(name: object, values: Any) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"a field is named {name!r}: names of fields must be strings")
    if name in OF_A_BATCH or name.startswith("_"):
        what = f"field '{name}' has the name of a part of a batch, batch.{name}"
        raise ValueError(f"{what}: rename it")
    if not isinstance(values, Tensor):
        fix = "give a tensor, or make the data with ClientData.from_arrays"
        raise TypeError(f"field '{name}' is a {type(values).__name__}: {fix}")
    check_numbers(values, name)


def _faults_of_client_fields(
    fields: Mapping[str, Tensor], client_fields: Mapping[str, Tensor], clients: int
) -> Iterator[str]:
    for name, values in client_fields.items():
        if name in fields:
            yield f"'{name}' is both a field and a client field: rename one of them"
        if len(values) != clients:
            what = f"client field '{name}' has {len(values)} values for {clients} clients"
            yield f"{what}: give one value per client"


def _faults_of_features(
    fields: Mapping[str, Tensor], features: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    for name, labels in features.items():
        if name not in fields or fields[name].dim() < 2 or len(labels) != fields[name].shape[-1]:
            what = f"features name {len(labels)} columns of '{name}'"
            yield f"{what}: there is no such field, or its last dimension has another size"
        repeated, times = Counter(labels).most_common(1)[0]
        if times > 1:
            what = f"features name two columns of '{name}' '{repeated}'"
            yield f"{what}: give each column its own name"


def _faults_of_levels(
    every: Mapping[str, Tensor], levels: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    for name, labels in levels.items():
        field, _, column = (name, "", "") if name in every else name.partition("[")
        if field not in every:
            yield f"levels are given for '{name}': there is no such field"
        codes = every[field]
        if column or type(codes) is not Tensor:
            continue  # rows that are not there (`hierfl.data.absent`) have no codes
        if codes.is_floating_point() or int(codes.min()) < 0 or int(codes.max()) >= len(labels):
            what = f"field '{field}' has codes other than 0..{len(labels) - 1}"
            yield f"{what}, the numbers of its levels: drop its levels, or code it again"


def expect_list(values: Any, what: str, fix: str) -> None:
    """Refuse a string where several names are expected."""
    if isinstance(values, str):
        raise TypeError(f"{what} the string '{values}': give {fix}")


def mapping_of(what: str, values: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a mapping by name, or an empty one for None."""
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(f"{what} is a {type(values).__name__}: give {{name: values}}")
    return values or {}


def feature_names(features: Mapping[str, Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
    """Return the names of the columns of fields."""
    by_field = mapping_of("features", features)
    for name, labels in by_field.items():
        expect_list(labels, f"the features of '{name}' are", "a list of names")
    return {name: tuple(map(str, labels)) for name, labels in by_field.items()}


def levels_without(
    levels: Mapping[str, tuple[str, ...]], names: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Return the levels of other fields than those named."""
    gone = set(names)
    return {
        key: v for key, v in levels.items() if key not in gone and key.split("[")[0] not in gone
    }


def is_frame(value: Any) -> bool:
    """Return whether a value is a pandas frame; pandas is slow to import."""
    return any(kind.__name__ == "DataFrame" for kind in type(value).__mro__)


def is_column(frame: Any, name: Any) -> bool:
    """Return whether a frame has a column of a name; refuse the name if there are several."""
    if not hasattr(frame, "columns") or not hasattr(frame, "__getitem__"):
        fix = "give a pandas frame, from_frame(frame, 'client', y='y')"
        raise TypeError(f"frame is a {type(frame).__name__}: {fix}")
    count = frame.columns.tolist().count(name) if isinstance(name, Hashable) else 0
    if count > 1:
        raise ValueError(f"the frame has {count} columns '{name}': rename all but one of them")
    return count == 1


def check_has(frame: Any, name: Any, where: str = "the frame") -> None:
    """Refuse a frame without a column, or with two of its name."""
    if not is_column(frame, name):
        columns = list(map(str, frame.columns))
        public = f"{where} has no column '{name}'"
        fix = did_you_mean(str(name), columns, f"its columns are {columns}")
        raise NoColumn(f"{public}: {fix}", public)


def offsets_of(counts: Tensor) -> Tensor:
    """Return where the rows of each client start, and where the last one's end, (N + 1,)."""
    return torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])


def check_dense(values: Tensor, name: str) -> None:
    """Refuse tensors other than plain dense values without a gradient."""
    is_plain = values.layout == torch.strided and not (values.is_nested or values.is_quantized)
    has_data = values.device.type != "meta" or type(values) is not Tensor  # `hierfl.data.absent`
    if values.requires_grad or not (is_plain and has_data):
        fix = "give plain values, such as .detach(), or .to_dense() of a sparse tensor"
        what = f"field '{name}' is not a dense tensor of values without a gradient"
        raise ValueError(f"{what}: {fix}")


def check_numbers(values: Tensor, name: str) -> None:
    """Refuse what is not dense, has no row dimension or no columns, or is complex."""
    check_dense(values, name)
    if values.is_complex():
        fix = "give its real and imaginary parts as two fields"
        raise TypeError(f"field '{name}' is complex: {fix}")
    if values.dim() == 0 or 0 in values.shape[1:]:
        what = f"has shape {tuple(values.shape)}, no columns: leave it out"
        if values.dim() == 0:
            what = "is a single number: give one value per row, or one per client"
        raise ValueError(f"field '{name}' {what}")


def positions_of(names: Sequence[str], chosen: Iterable[Any]) -> Tensor:
    """Return the positions of the clients chosen by name, (len(chosen),) int64."""
    expect_list(chosen, "the clients are given as", "a list of names")
    place = {name: i for i, name in enumerate(names)}
    listed = [str(n) for n in chosen]
    if unknown := [n for n in listed if n not in place]:
        there = ", ".join(names[:8]) + (", ..." if len(place) > 8 else "")
        raise NoSuchName(f"unknown client '{unknown[0]}': the clients are {there}")
    return torch.tensor([place[n] for n in listed], dtype=torch.long)
