"""Rows sorted by client, and rows of separate clients joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.data.arrays import Array, as_tensor
from hierfl.data.client_ids import ids_of


class SortedRows(NamedTuple):
    """Rows sorted by client: fields (n, ...), offsets (N + 1,) int64 and the N names."""

    fields: dict[str, Tensor]
    offsets: Tensor
    names: tuple[str, ...]


class JoinedClients(NamedTuple):
    """The rows of separate clients: fields (n, ...), each row's client (n,), and the names."""

    fields: dict[str, Tensor]
    client_id: NDArray[np.int64]
    names: list[str]


def sort_by_client(
    client_id: Array, names: Sequence[str] | None, fields: Mapping[str, Array]
) -> SortedRows:
    """Sort rows by client, keeping their order within each; `names` are those of ids 0..N-1."""
    raw = ids_of(client_id)
    ids, inverse, counts = np.unique(raw, return_inverse=True, return_counts=True)
    labels = tuple(str(i) for i in ids) if names is None else _names_of(ids, names)
    order = torch.as_tensor(np.argsort(inverse, kind="stable"))
    tensors = {name: as_tensor(values, name) for name, values in fields.items()}
    for name, values in tensors.items():
        _check_index(client_id, fields[name], name)
        if len(values) != len(raw):
            raise ValueError(
                f"field '{name}' has shape {tuple(values.shape)}, but client_id has {len(raw)} "
                "rows: give one value per row"
            )
    return SortedRows(
        fields={name: values[order] for name, values in tensors.items()},
        offsets=torch.as_tensor(np.concatenate([[0], np.cumsum(counts)])),
        names=labels,
    )


def _check_index(client_id: Any, values: Any, name: str) -> None:
    """Refuse a pandas column whose index differs from the ids': its order may differ too."""
    index: Any = getattr(client_id, "index", None)
    other: Any = getattr(values, "index", None)
    if hasattr(index, "equals") and hasattr(other, "equals") and not index.equals(other):
        raise ValueError(
            f"field '{name}' and client_id are pandas columns with different indices: take both "
            "from one frame, or give .to_numpy() of rows in the same order"
        )


def _names_of(ids: NDArray[Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of clients whose sorted ids must be 0..N-1, all of them present."""
    if isinstance(names, str):
        raise TypeError(f"`names` is the string '{names}': give a list, one name per client")
    if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= len(names):
        raise ValueError(
            f"`names` has {len(names)} entries: the ids must be integers 0..{len(names) - 1}"
        )
    absent = sorted(set(range(len(names))) - set(ids.tolist()))
    if absent:
        raise ValueError(
            f"client '{names[absent[0]]}' has no rows: leave it out, or give it at least one"
        )
    return tuple(str(n) for n in names)


def join_clients(
    clients: Mapping[str, Mapping[str, Array]] | Sequence[Mapping[str, Array]],
) -> JoinedClients:
    """Join the arrays of separate clients, field by field; without names they are "0", "1", ..."""
    named = _named(clients)
    first = next(iter(named.values()))
    columns: dict[str, list[Tensor]] = {name: [] for name in first}
    counts = []
    for client, own in named.items():
        if set(own) != set(columns):
            raise ValueError(
                f"client '{client}' has the fields {sorted(own)}, but the first client has "
                f"{sorted(columns)}: give all clients the same fields"
            )
        tensors = {name: as_tensor(values, f"{client}.{name}") for name, values in own.items()}
        lengths = {name: len(values) for name, values in tensors.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"client '{client}' has fields of different lengths, {lengths}: give one value per "
                f"row"
            )
        for name, values in tensors.items():
            _check_like(client, name, values, columns[name][:1])
            columns[name].append(values)
        counts.append(next(iter(lengths.values())))
    return JoinedClients(
        fields={name: torch.cat(parts) for name, parts in columns.items()},
        client_id=np.repeat(np.arange(len(named)), counts),
        names=list(named),
    )


def _named(clients: Any) -> dict[str, Mapping[str, Array]]:
    """Return the clients by name, once they are known to be mappings of fields."""
    if not isinstance(clients, Mapping | list | tuple):
        raise TypeError(
            f"clients is a {type(clients).__name__}: give {{name: {{field: values}}}}, or a list "
            "of such fields (for a table, ClientData.from_frame)"
        )
    named = (
        dict(clients)
        if isinstance(clients, Mapping)
        else {str(i): c for i, c in enumerate(clients)}
    )
    if not named:
        raise ValueError("no clients were given: give at least one")
    for client, own in named.items():
        if not isinstance(own, Mapping):
            raise TypeError(
                f"client '{client}' is a {type(own).__name__}: give its fields by name, "
                f"{{'y': ...}}"
            )
        if not own:
            raise ValueError(f"client '{client}' has no fields: give at least one, {{'y': ...}}")
    return named


def _check_like(client: str, name: str, values: Tensor, first: Sequence[Tensor]) -> None:
    """Refuse rows of another shape, or of another kind of number, than the first client's."""
    for like in first:
        if like.shape[1:] != values.shape[1:]:
            raise ValueError(
                f"client '{client}': a row of '{name}' has shape {tuple(values.shape[1:])}, but "
                f"the first client's has {tuple(like.shape[1:])}: give all clients the same columns"
            )
        if torch.bool in (like.dtype, values.dtype) and like.dtype != values.dtype:
            found, wanted = (str(v.dtype).removeprefix("torch.") for v in (values, like))
            raise ValueError(
                f"client '{client}': '{name}' is {found}, but the first client's is {wanted}: give "
                "both as numbers"
            )
