"""Checks of every `ClientData`: names, offsets, fields and features fit together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hierfl.data.arrays import check_dense, check_rows_of_numbers
from hierfl.data.client_ids import check_client_names


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
    _check_features(fields, features)
    _check_levels({**fields, **client_fields}, levels)


def _check_offsets(offsets: Any, names: Sequence[str]) -> None:
    """Refuse offsets that do not give every client its own rows, from the first row on."""
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
    """Refuse a field that is no dense tensor of real numbers with a row dimension."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"a field is named {name!r}: names of fields must be strings")
    if not isinstance(values, Tensor):
        raise TypeError(
            f"field '{name}' is a {type(values).__name__}: give a tensor, or make the data with "
            f"ClientData.from_arrays"
        )
    check_dense(values, name)
    check_rows_of_numbers(values, name)


def _check_features(fields: Mapping[str, Tensor], features: Mapping[str, tuple[str, ...]]) -> None:
    """Check that every column of a field with feature names has one, and no two the same."""
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
    """Check that levels are of a field, and that its codes are among them."""
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


def feature_names(
    features: Mapping[str, Sequence[str]] | None,
) -> dict[str, tuple[str, ...]]:
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
