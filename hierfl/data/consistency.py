"""Clients' ids and names as users pass them, and checks that the parts of `ClientData` fit."""

from __future__ import annotations

import numbers
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.data.arrays import Array, check_dense, check_rows_of_numbers, is_missing

# what libraries print for a missing client; as a level of a category each is a name like any other
MISSING = frozenset({"nan", "NaN", "NaT", "<NA>", "None", "masked"})
# of `ClientBatch`: a field of such a name would be hidden by it
OF_A_BATCH = frozenset(
    "client_fields clients counts data fields is_mini_batch joint_normal key mask mean num_clients "
    "num_rows own_keys packed plate redrawn root rows shared_key sum words".split()
)
_WIDEST = 64  # characters of an id that is kept in an array of strings
_RULE = "client_id must be integers or strings, all of one kind and none missing (NaN)"


def ids_of(client_id: Array) -> NDArray[Any]:
    """Return one id per row, (n,): integers, booleans, dates or strings."""
    if isinstance(client_id, Tensor):
        client_id = client_id.detach().cpu().resolve_conj().resolve_neg()
    if isinstance(client_id, np.ma.MaskedArray) and np.ma.getmaskarray(client_id).any():
        raise ValueError(
            f"client_id has {int(np.ma.getmaskarray(client_id).sum())} masked rows: leave these "
            "rows out, or fill their ids"
        )
    if isinstance(client_id, list | tuple) and {type(i) for i in client_id} != {Tensor}:
        raw = _objects(client_id)
    else:
        raw = np.asarray(client_id)
    if raw.ndim != 1:
        what = f"has shape {raw.shape}" if raw.ndim else f"is a single {type(client_id).__name__}"
        raise ValueError(f"client_id {what}: give one id per row, of shape (n,)")
    if len(raw) == 0:
        raise ValueError("client_id has no rows: give at least one row of one client")
    return _of_objects(raw) if raw.dtype.kind == "O" else _checked(raw)


def _objects(ids: Sequence[Any]) -> NDArray[Any]:
    """Return a list as an array of its entries, (n,), unless an entry is a sequence itself."""
    if any(isinstance(i, list | tuple | np.ndarray) for i in ids):
        return np.asarray(ids)
    raw = np.empty(len(ids), object)
    raw[:] = ids
    return raw


def _of_objects(raw: NDArray[Any]) -> NDArray[Any]:
    """Return Python objects as integers, booleans or strings, whichever all of them are."""
    first = _kind(type(raw[0]))
    if len({_kind(kind) for kind in set(map(type, raw))}) > 1 or first not in (
        "int",
        "bool",
        "str",
    ):
        for row, value in enumerate(raw):
            if is_missing(value):
                raise TypeError(f"client_id is {value} in row {row}: {_RULE}")
        odd = next((v for v in raw if _kind(type(v)) != first), raw[0])
        both = f"{raw[0]!r} and {odd!r}" if odd is not raw[0] else f"{odd!r}"
        raise TypeError(f"client_id holds {both}: {_RULE}")
    listed = raw.tolist()
    # an array of strings drops NUL at their ends, and is as wide as the longest of them
    if first == "str" and ("\0" in "".join(listed) or max(map(len, listed)) > _WIDEST):
        return raw
    found = np.array(listed)
    return raw if found.dtype.kind == "f" else found  # integers beyond int64 beside smaller ones


def _kind(kind: type) -> str:
    if issubclass(kind, bool | np.bool_):
        return "bool"
    if issubclass(kind, numbers.Integral):
        return "int"
    return "str" if issubclass(kind, str) else kind.__name__


def _checked(raw: NDArray[Any]) -> NDArray[Any]:
    """Refuse missing dates, and ids that are not integers, booleans, strings or dates."""
    if raw.dtype.kind in "Mm":
        if np.isnat(raw).any():
            raise TypeError(f"client_id is NaT in row {int(np.isnat(raw).argmax())}: {_RULE}")
    elif raw.dtype.kind == "f" and np.isnan(raw).any():
        raise TypeError(f"client_id is nan in row {int(np.isnan(raw).argmax())}: {_RULE}")
    elif raw.dtype.kind not in "iubU":
        raise TypeError(f"client_id holds {raw[0]!r}: {_RULE}")
    return raw


def check_client_names(names: Sequence[str]) -> None:
    """Refuse names that are missing, cannot be written, occur twice, or look like another."""
    if not names:
        raise ValueError("there are no clients: give at least one row of one client")
    try:
        joined = "".join(names)
    except TypeError as error:
        odd = next(n for n in names if not isinstance(n, str))
        raise TypeError(f"a client is named {odd!r}: names must be strings") from error
    different = set(names)
    if len(different) < len(names):
        repeated = Counter(names).most_common(1)[0][0]
        raise ValueError(f"two clients are named '{repeated}': client names must be unique")
    if missing := different & MISSING:
        raise ValueError(
            f"a client is named '{min(missing)}', the word for a missing value: leave its rows "
            "out, or rename it"
        )
    for name in () if joined.isprintable() else names:
        if any(unicodedata.category(c) in ("Cc", "Cs") for c in name):
            raise ValueError(
                f"client {name!r} has a control character or half a character in its name: rename "
                f"it"
            )
    similar = look_alike(names, joined)
    if similar:
        raise ValueError(
            f"clients {similar[0]!r} and {similar[1]!r} differ only in case, spaces or Unicode form: "
            "make them one client, or rename one"
        )
    if not all(map(str.strip, names)):
        raise ValueError("a client has an empty name: name it, or leave its rows out")


def plain_form(name: str) -> str:
    """Return what a name shares with others that look like it: case, blanks and Unicode form set aside.

    >>> plain_form(" St. Mary") == plain_form("ST.  MARY")
    True
    """
    visible = "".join(c for c in name if unicodedata.category(c) != "Cf")
    folded = unicodedata.normalize("NFD", visible).casefold()
    return " ".join(unicodedata.normalize("NFC", folded).split())


def look_alike(names: Sequence[str], joined: str) -> tuple[str, str] | None:
    """Return two names that differ only in case, spaces, invisible characters or Unicode form."""
    if joined.isascii() and joined.isprintable():
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
        raise ValueError("no field was given: name at least one, such as x=... or y=...")
    check_client_names(names)
    _check_offsets(offsets, names)
    for name, values in {**fields, **client_fields}.items():
        _check_field(name, values)
    num_rows = int(offsets[-1])
    for name, values in fields.items():
        if len(values) != num_rows:
            raise ValueError(
                f"field '{name}' has {len(values)} rows, but the clients have {num_rows}: give one "
                f"value per row"
            )
    for name, values in client_fields.items():
        if name in fields:
            raise ValueError(f"'{name}' is both a field and a client field: rename one of them")
        if len(values) != len(names):
            raise ValueError(
                f"client field '{name}' has {len(values)} values for {len(names)} clients: "
                "give one value per client"
            )
    if features:
        _check_features(fields, features)
    if levels:
        _check_levels({**fields, **client_fields}, levels)


def _check_offsets(offsets: Any, names: Sequence[str]) -> None:
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int64 or offsets.dim() != 1:
        kind = (
            f"{str(offsets.dtype).removeprefix('torch.')} of shape {tuple(offsets.shape)}"
            if isinstance(offsets, Tensor)
            else f"a {type(offsets).__name__}"
        )
        raise ValueError(f"offsets are {kind}: give a tensor of int64, of shape (N + 1,)")
    if len(offsets) != len(names) + 1:
        raise ValueError(
            f"{len(names)} client names for {len(offsets) - 1} clients: give one name per client"
        )
    if int(offsets[0]) != 0:
        raise ValueError(
            f"offsets start at {int(offsets[0])}: they must start at 0, so that every row has a "
            f"client"
        )
    empty = (offsets.diff() <= 0).nonzero()
    if len(empty):
        raise ValueError(
            f"client '{names[int(empty[0])]}' has no rows: leave it out, or give it at least one"
        )


def _check_field(name: object, values: Any) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"a field is named {name!r}: names of fields must be strings")
    if name in OF_A_BATCH:
        raise ValueError(
            f"field '{name}' has the name of a part of a batch, batch.{name}: rename it"
        )
    if not isinstance(values, Tensor):
        raise TypeError(
            f"field '{name}' is a {type(values).__name__}: give a tensor, or make the data with "
            f"ClientData.from_arrays"
        )
    check_dense(values, name)
    check_rows_of_numbers(values, name)


def _check_features(fields: Mapping[str, Tensor], features: Mapping[str, tuple[str, ...]]) -> None:
    for name, labels in features.items():
        if name not in fields or fields[name].dim() < 2 or len(labels) != fields[name].shape[-1]:
            raise ValueError(
                f"features name {len(labels)} columns of '{name}': there is no such field, or its "
                "last dimension has another size"
            )
        repeated, times = Counter(labels).most_common(1)[0]
        if times > 1:
            raise ValueError(
                f"features name two columns of '{name}' '{repeated}': give each column its own name"
            )


def _check_levels(known: Mapping[str, Tensor], levels: Mapping[str, tuple[str, ...]]) -> None:
    for name, labels in levels.items():
        field, _, column = name.partition("[")
        if name in known:
            field, column = name, ""
        if field not in known:
            raise ValueError(f"levels are given for '{name}': there is no such field")
        if column:
            continue
        codes = known[field]
        if type(codes) is not Tensor:
            continue  # rows that are not there (`hierfl.data.absent`) have no codes
        if codes.is_floating_point() or int(codes.min()) < 0 or int(codes.max()) >= len(labels):
            raise ValueError(
                f"field '{field}' has codes other than 0..{len(labels) - 1}, the numbers of its "
                "levels: drop its levels, or code it again"
            )


def mapping_of(what: str, values: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a mapping by name, or an empty one for None."""
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(f"{what} is a {type(values).__name__}: give {{name: values}}")
    return values or {}


def feature_names(features: Mapping[str, Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
    """Return the names of the columns of fields."""
    named = mapping_of("features", features)
    for name, labels in named.items():
        if isinstance(labels, str):
            raise TypeError(
                f"the features of '{name}' are the string '{labels}': give a list of names"
            )
    return {name: tuple(map(str, labels)) for name, labels in named.items()}


def levels_without(
    levels: Mapping[str, tuple[str, ...]], names: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Return the levels of other fields than those named."""
    gone = set(names)
    return {
        key: v for key, v in levels.items() if key not in gone and key.split("[")[0] not in gone
    }
