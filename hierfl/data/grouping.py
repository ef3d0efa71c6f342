"""Rows sorted and joined by client, and the choice of clients and of rows."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import expect, expect_integer
from hierfl.data.arrays import Array, as_tensor
from hierfl.data.consistency import ids_of

PLACES_AT_ONCE = 1 << 20  # places in clients' orders that are drawn together


class SortedRows(NamedTuple):
    """Rows sorted by client: fields (n, ...), offsets (N + 1,) int64 and the N names."""

    fields: dict[str, Tensor]
    offsets: Tensor
    names: tuple[str, ...]


class JoinedClients(NamedTuple):
    """The rows of separate clients: each row's client (n,), the names, and fields (n, ...)."""

    client_id: NDArray[np.int64]
    names: list[str]
    fields: dict[str, Tensor]


def sort_by_client(
    client_id: Array, names: Sequence[str] | None, fields: Mapping[str, Array]
) -> SortedRows:
    """Sort rows by client, keeping their order within each; `names` are those of ids 0..N-1."""
    raw = ids_of(client_id)
    ids, inverse, counts = np.unique(raw, return_inverse=True, return_counts=True)
    labels = tuple(map(str, ids)) if names is None else _names_of(ids, names)
    order = torch.as_tensor(np.argsort(inverse, kind="stable"))
    tensors = {name: as_tensor(values, name) for name, values in fields.items()}
    index: Any = getattr(client_id, "index", None)
    for name, values in tensors.items():
        other: Any = getattr(fields[name], "index", None)
        if hasattr(index, "equals") and hasattr(other, "equals") and not index.equals(other):
            raise ValueError(
                f"field '{name}' and client_id are pandas columns with different indices: take both "
                "from one frame, or give .to_numpy() of rows in the same order"
            )
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
    return tuple(map(str, names))


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


def positions_of(names: Sequence[str], wanted: Iterable[Any]) -> Tensor:
    """Return the positions of the clients named, (len(wanted),) int64."""
    if isinstance(wanted, str):
        raise TypeError(f"the clients are given as the string '{wanted}': give a list of names")
    place = {name: i for i, name in enumerate(names)}
    listed = [str(n) for n in wanted]
    unknown = [n for n in listed if n not in place]
    if unknown:
        raise KeyError(
            f"unknown client '{unknown[0]}': the clients are {', '.join(names[:8])}"
            + (", ..." if len(place) > 8 else "")
        )
    return torch.tensor([place[n] for n in listed], dtype=torch.long)


def chosen_clients(clients: Any, names: Sequence[str]) -> Tensor:
    """Return the positions of clients chosen by names, positions or a mask, int64."""
    if isinstance(clients, str | int):
        raise TypeError(f"the clients are given as {clients!r}: give a list, [{clients!r}]")
    if isinstance(clients, Tensor | np.ndarray):
        clients = clients.tolist()
    listed = list(clients)
    if not listed:
        raise ValueError("no clients were chosen: give at least one name or position")
    if all(isinstance(i, bool | np.bool_) for i in listed):
        if len(listed) != len(names):
            raise ValueError(
                f"the mask has {len(listed)} entries for {len(names)} clients: give one for each"
            )
        return torch.tensor(listed).nonzero()[:, 0]
    if any(isinstance(i, str) for i in listed):
        if not all(isinstance(i, str) for i in listed):
            raise TypeError(
                "the clients are given by names and positions: give either all names or all "
                "positions"
            )
        return positions_of(names, listed)
    ids = torch.tensor([_whole(i) for i in listed], dtype=torch.long)
    if int(ids.min()) < 0 or int(ids.max()) >= len(names):
        raise KeyError(f"client position out of range: there are {len(names)} clients")
    return ids


def _whole(position: Any) -> int:
    try:
        return operator.index(position)
    except TypeError as error:
        raise TypeError(
            f"client position {position!r} is no integer: give names, positions or a boolean mask"
        ) from error


def rows_kept(keep: Any, num_rows: int) -> Tensor:
    """Return a mask of rows, (n,) bool, that keeps one at least."""
    mask = torch.as_tensor(keep)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"keep holds {str(mask.dtype).removeprefix('torch.')}, no booleans: give a condition "
            "on each row, such as x > 0"
        )
    if mask.shape != (num_rows,):
        raise ValueError(
            f"keep has shape {tuple(mask.shape)}, but there are {num_rows} rows: give one boolean "
            f"per row"
        )
    if not bool(mask.any()):
        raise ValueError("no row is kept: a federation needs at least one row")
    return mask


def checked_fraction(fraction: Any, seed: Any) -> None:
    """Refuse a share of rows outside (0, 1), and a seed that is no integer."""
    expect(fraction=(fraction, "(0, 1)"))
    expect_integer(seed, "seed")


def rows_of(starts: Tensor, counts: Tensor) -> Tensor:
    """Return the positions of rows, client by client, from their first rows and counts (C,)."""
    within = torch.arange(int(counts.sum())) - torch.repeat_interleave(
        counts.cumsum(0) - counts, counts
    )
    return torch.repeat_interleave(starts, counts) + within


def offsets_of(counts: Tensor) -> Tensor:
    """Return where the rows of each client start, and where the last one's end, (N + 1,)."""
    return torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])


def first_part(offsets: Tensor, keys: Tensor, fraction: float) -> Tensor:
    """Draw which rows, (n,) bool, are in the first part of a split of every client's rows."""
    counts = offsets.diff()
    if int(counts.max()) == 1:
        raise ValueError(
            "every client has a single row, so a split leaves the second part empty: split the "
            "clients, data.select(...)"
        )
    first = (counts * fraction).round().long().clamp(min=1)
    first = torch.minimum(first, (counts - 1).clamp(min=1))
    keep = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    kind = counts.double().log2().ceil()
    for size in kind.unique():  # clients of similar size together: orders are padded to the largest
        same = (kind == size).nonzero()[:, 0]
        width = int(counts[same].max())
        for ids in same.split(max(1, PLACES_AT_ONCE // width)):
            order = noise.permutations(keys[ids], counts[ids], width)
            chosen = torch.arange(width) < first[ids][:, None]
            keep[(offsets[ids][:, None] + order)[chosen]] = True
    return keep
