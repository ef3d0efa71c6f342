"""Clients' ids as users pass them; rows sorted and joined by client, the choice of clients and of rows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import NoSuchName
from hierfl.data.arrays import Array, as_tensor, masked_in
from hierfl.data.consistency import check_length, expect_list, positions_of

PLACES_AT_ONCE = 1 << 20  # places in clients' orders that are drawn together


class SortedRows(NamedTuple):
    """Rows sorted by client: fields (n, ...), offsets (N + 1,) int64 and the N names."""

    fields: dict[str, Tensor]
    offsets: Tensor
    names: tuple[str, ...]


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
            what = f"field '{name}' and client_id are pandas columns with different indices"
            fix = "take both from one frame, or give .to_numpy() of rows in the same order"
            raise ValueError(f"{what}: {fix}")
        check_length(name, values, len(raw), "client_id has")
    return SortedRows(
        fields={name: values[order] for name, values in tensors.items()},
        offsets=torch.as_tensor(np.concatenate([[0], np.cumsum(counts)])),
        names=labels,
    )


def _names_of(ids: NDArray[Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of clients whose sorted ids must be 0..N-1, all of them present."""
    expect_list(names, "`names` is", "a list, one name per client")
    if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= len(names):
        fix = f"the ids must be integers 0..{len(names) - 1}"
        raise ValueError(f"`names` has {len(names)} entries: {fix}")
    if lacking := sorted(set(range(len(names))) - set(ids.tolist())):
        fix = "leave it out, or give it at least one"
        raise ValueError(f"client '{names[lacking[0]]}' has no rows: {fix}")
    return tuple(map(str, names))


def join_clients(
    clients: Mapping[str, Mapping[str, Array]] | Sequence[Mapping[str, Array]],
) -> tuple[NDArray[np.int64], list[str], dict[str, Tensor]]:
    """Return each row's client (n,), the names, and fields (n, ...); without names they are "0", "1", ..."""
    by_name = _by_name(clients)
    tensors = {
        client: {name: as_tensor(values, f"{client}.{name}") for name, values in own.items()}
        for client, own in by_name.items()
    }
    first = next(iter(tensors.values()))
    for client, own in tensors.items():
        if fault := next(_faults_of_client(own, first), ""):
            raise ValueError(f"client '{client}'{fault}")
    counts = [len(next(iter(own.values()))) for own in tensors.values()]
    fields = {name: torch.cat([own[name] for own in tensors.values()]) for name in first}
    return np.repeat(np.arange(len(tensors)), counts), list(tensors), fields


def _by_name(clients: Any) -> dict[str, Mapping[str, Array]]:
    if isinstance(clients, list | tuple):
        clients = {str(i): own for i, own in enumerate(clients)}
    are_fields = isinstance(clients, Mapping) and all(
        isinstance(own, Mapping) and own for own in clients.values()
    )
    if not are_fields or not clients:
        fix = "give {name: {field: values}} with at least one client, or a list of such fields"
        what = f"clients is a {type(clients).__name__}: {fix}"
        raise TypeError(f"{what} (for a table, ClientData.from_frame)")
    return dict(clients)


def _faults_of_client(own: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield how a client's fields differ from each other's length, or from the first client's."""
    if set(own) != set(first):
        what = f" has the fields {sorted(own)}, but the first client has {sorted(first)}"
        yield f"{what}: give all clients the same fields"
    lengths = {name: len(values) for name, values in own.items()}
    if len(set(lengths.values())) > 1:
        yield f" has fields of different lengths, {lengths}: give one value per row"
    for name, values in own.items():
        like = first[name]
        if like.shape[1:] != values.shape[1:]:
            shape, usual = tuple(values.shape[1:]), tuple(like.shape[1:])
            what = f": a row of '{name}' has shape {shape}, but the first client's has {usual}"
            yield f"{what}: give all clients the same columns"
        if torch.bool in (like.dtype, values.dtype) and like.dtype != values.dtype:
            kind, other = (str(v.dtype).removeprefix("torch.") for v in (values, like))
            what = f": '{name}' is {kind}, but the first client's is {other}"
            yield f"{what}: give both as numbers"


def chosen_clients(clients: Any, names: Sequence[str]) -> Tensor:
    """Return the positions of clients chosen by names, positions or a mask, int64."""
    if isinstance(clients, str | int):
        raise TypeError(f"the clients are given as {clients!r}: give a list, [{clients!r}]")
    listed = clients.tolist() if isinstance(clients, Tensor | np.ndarray) else list(clients)
    if not listed:
        raise ValueError("no clients were chosen: give at least one name or position")
    if all(isinstance(i, str) for i in listed):
        return positions_of(names, listed)
    index = np.asarray(listed)
    is_mask = index.dtype == bool and index.shape == (len(names),)
    if not is_mask and (
        index.dtype.kind not in "iu" or not 0 <= index.min() <= index.max() < len(names)
    ):
        fix = f"positions 0..{len(names) - 1}, or a mask of {len(names)} booleans"
        raise NoSuchName(f"no clients are at {listed}: give all names, {fix}")
    return torch.arange(len(names))[torch.from_numpy(index)]


def rows_kept(keep: Any, num_rows: int) -> Tensor:
    """Return a mask of rows, (n,) bool, that keeps one at least."""
    mask = torch.as_tensor(keep)
    if mask.dtype != torch.bool or mask.shape != (num_rows,):
        what = f"keep is {str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
        raise ValueError(f"{what}: give a condition on each of the {num_rows} rows, such as x > 0")
    if not bool(mask.any()):
        raise ValueError("no row is kept: a federation needs at least one row")
    return mask


def rows_of(starts: Tensor, counts: Tensor) -> Tensor:
    """Return the positions of rows, client by client, from their first rows and counts (C,)."""
    before = counts.cumsum(0) - counts  # rows of the clients before each
    return torch.arange(int(counts.sum())) + torch.repeat_interleave(starts - before, counts)


def first_part(offsets: Tensor, keys: Tensor, fraction: float) -> Tensor:
    """Draw which rows, (n,) bool, are in the first part of a split of every client's rows."""
    counts = offsets.diff()
    if int(counts.max()) == 1:
        fix = "split the clients, data.select(...)"
        what = "every client has a single row, so a split leaves the second part empty"
        raise ValueError(f"{what}: {fix}")
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


_WIDEST = 64  # characters of an id that is kept in an array of strings
_KINDS = ("integer", "boolean", "string", "datetime64", "timedelta64")


def ids_of(client_id: Array) -> NDArray[Any]:
    """Return one id per row, (n,): integers, booleans, dates or strings."""
    import pandas as pd  # slow to import

    if isinstance(client_id, Tensor):
        client_id = client_id.detach().cpu().resolve_conj().resolve_neg()
    is_list = isinstance(client_id, list | tuple) and {*map(type, client_id)} != {Tensor}
    raw = np.asarray(client_id, object if is_list else None)
    fault = f"has shape {raw.shape}: give one id per row, of shape (n,)" if raw.ndim != 1 else ""
    if masked := masked_in(client_id):
        fault = f"has {masked} masked rows: leave these rows out, or fill their ids"
    elif raw.shape == (0,):
        fault = "has no rows: give at least one row of one client"
    if fault:
        raise ValueError(f"client_id {fault}")
    missing, kind = pd.isna(raw), pd.api.types.infer_dtype(raw, skipna=False)
    if missing.any() or kind not in _KINDS:
        row = int(missing.argmax())
        fault = f"is {raw[row]} in row {row}" if missing.any() else f"holds {kind} values"
        fix = "client_id must be integers or strings, all of one kind and none missing (NaN)"
        raise TypeError(f"client_id {fault}: {fix}")
    return _of_objects(raw) if raw.dtype.kind == "O" else raw


def _of_objects(raw: NDArray[Any]) -> NDArray[Any]:
    """Return Python objects of one kind as an array of integers, booleans or strings."""
    listed = raw.tolist()
    # an array of strings drops NUL at their ends, and is as wide as the longest of them
    is_text = isinstance(listed[0], str)
    if is_text and ("\0" in "".join(listed) or max(map(len, listed)) > _WIDEST):
        return raw
    ids = np.array(listed)
    return raw if ids.dtype.kind == "f" else ids  # integers beyond int64 beside smaller ones
