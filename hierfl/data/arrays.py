"""Arrays as users pass them, checked and turned into tensors whose rows are sorted by client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = Any  # anything torch.as_tensor takes: a tensor, a NumPy array, a list of numbers


class SortedRows(NamedTuple):
    """Rows sorted by client.

    Args:
        fields: name -> Tensor (n, ...), n the rows of all clients together.
        offsets: (N + 1,) int64; client k owns the rows `offsets[k]:offsets[k + 1]`.
        names: the N clients' names.
    """

    fields: dict[str, Tensor]
    offsets: Tensor
    names: tuple[str, ...]


class JoinedClients(NamedTuple):
    """The rows of separate clients, one client after another.

    Args:
        fields: name -> Tensor (n, ...), n the rows of all clients together.
        client_id: (n,) int64, the client that each row belongs to, 0..N-1.
        names: the N clients' names.
    """

    fields: dict[str, Tensor]
    client_id: NDArray[np.int64]
    names: list[str]


def as_tensor(values: Array, name: str) -> Tensor:
    """Return `values` as a tensor: floats in torch's default dtype, integers as int64, booleans as they are.

    Args:
        values: anything that torch.as_tensor takes.
        name: the field's name, for error messages.

    Raises:
        TypeError: the values are not numbers, or are complex.
        ValueError: `values` is a single number.
    """
    try:
        # Arrays are copied: those that pandas hands out are read-only, which torch warns of.
        tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise TypeError(f"field '{name}' is not numeric ({error}): encode it as numbers") from error
    if tensor.dim() == 0:
        raise ValueError(
            f"field '{name}' is a single number: give one value per row, or one per client"
        )
    if tensor.is_floating_point():
        return tensor.to(torch.get_default_dtype())
    if tensor.is_complex():
        raise TypeError(
            f"field '{name}' is complex: give its real and imaginary parts as two fields"
        )
    return tensor if tensor.dtype == torch.bool else tensor.long()


def sort_by_client(
    client_id: Array, names: Sequence[str] | None, fields: Mapping[str, Array]
) -> SortedRows:
    """Sort rows by client, keeping the order of the rows within each client.

    Args:
        client_id: (n,) integers or strings, the client that each row belongs to.
        names: with integer ids 0..N-1, the name of each client; the ids as strings if None.
        fields: name -> (n, ...).

    Returns:
        The rows, with the clients in the order of their sorted ids.

    Raises:
        TypeError: ids that are neither integers nor strings, or are of several kinds; a field that is not
            numeric.
        ValueError: `client_id` is not (n,), `names` does not fit it, or a field has another number of rows.
    """
    raw = np.asarray(client_id)
    if raw.ndim != 1:
        raise ValueError(
            f"client_id has shape {raw.shape}: give one id per row, of shape ({len(raw)},)"
        )
    if raw.dtype.kind == "f" or (raw.dtype.kind == "O" and len({type(i) for i in raw}) > 1):
        raise TypeError(
            "client_id must be integers or strings, all of one kind and none missing (NaN)"
        )
    ids, inverse, counts = np.unique(raw, return_inverse=True, return_counts=True)
    labels = tuple(str(i) for i in ids) if names is None else _names_of(ids, names)
    order = torch.as_tensor(np.argsort(inverse, kind="stable"))
    tensors = {name: as_tensor(values, name) for name, values in fields.items()}
    for name, values in tensors.items():
        if len(values) != len(raw):
            raise ValueError(
                f"field '{name}' has shape {tuple(values.shape)}, but client_id has {len(raw)} rows"
            )
    return SortedRows(
        fields={name: values[order] for name, values in tensors.items()},
        offsets=torch.as_tensor(np.concatenate([[0], np.cumsum(counts)])),
        names=labels,
    )


def _names_of(ids: NDArray[Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of clients whose sorted ids must be 0..N-1, all of them present."""
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
    """Join the arrays of separate clients, field by field.

    Args:
        clients: name -> {field: (N_k, ...)}, or a list of such dicts, whose clients are named "0", "1", ...

    Raises:
        TypeError: a field is not numeric.
        ValueError: no clients; a client with other fields than the first, with fields of different lengths,
            or with rows of another shape than the first client's.
    """
    named = (
        dict(clients)
        if isinstance(clients, Mapping)
        else {str(i): c for i, c in enumerate(clients)}
    )
    if not named:
        raise ValueError("no clients were given")
    first = next(iter(named.values()))
    columns: dict[str, list[Tensor]] = {name: [] for name in first}
    counts = []
    for client, own in named.items():
        if set(own) != set(columns):
            raise ValueError(
                f"client '{client}' has the fields {sorted(own)}, but the first client has {sorted(columns)}"
            )
        tensors = {name: as_tensor(values, f"{client}.{name}") for name, values in own.items()}
        lengths = {name: len(values) for name, values in tensors.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"client '{client}' has fields of different lengths: {lengths}")
        for name, values in tensors.items():
            if columns[name] and columns[name][0].shape[1:] != values.shape[1:]:
                found, wanted = tuple(values.shape[1:]), tuple(columns[name][0].shape[1:])
                raise ValueError(
                    f"client '{client}': a row of '{name}' has shape {found}, "
                    f"but the first client's has {wanted}"
                )
            columns[name].append(values)
        counts.append(next(iter(lengths.values())))
    return JoinedClients(
        fields={name: torch.cat(parts) for name, parts in columns.items()},
        client_id=np.repeat(np.arange(len(named)), counts),
        names=list(named),
    )


def read_frame(
    frame: Any, client: str, fields: Mapping[str, str | Sequence[str]]
) -> tuple[dict[str, Array], dict[str, tuple[str, ...]]]:
    """Read fields from the columns of a pandas frame.

    Args:
        frame: a pandas frame.
        client: the column that holds the client ids.
        fields: field -> a column, or a list of columns.

    Returns:
        The fields, (n,) or (n, columns), and the names of the columns of those given as a list.

    Raises:
        KeyError: the frame lacks a column.
    """
    wanted = [client, *(c for v in fields.values() for c in ([v] if isinstance(v, str) else v))]
    missing = [c for c in wanted if c not in frame.columns]
    if missing:
        raise KeyError(
            f"the frame has no column '{missing[0]}': its columns are {list(frame.columns)}"
        )
    arrays = {
        name: frame[v if isinstance(v, str) else list(v)].to_numpy() for name, v in fields.items()
    }
    return arrays, {name: tuple(v) for name, v in fields.items() if not isinstance(v, str)}


def check_consistent(
    fields: Mapping[str, Tensor],
    offsets: Tensor,
    names: tuple[str, ...],
    client_fields: Mapping[str, Tensor],
    features: Mapping[str, tuple[str, ...]],
) -> None:
    """Check that the parts of a `ClientData`, which documents them, fit together.

    Raises:
        ValueError: as `ClientData`.
    """
    if not fields:
        raise ValueError("no field was given: name at least one, such as x=... or y=...")
    if len(set(names)) < len(names):
        repeated = Counter(names).most_common(1)[0][0]
        raise ValueError(f"two clients are named '{repeated}': client names must be unique")
    if len(offsets) != len(names) + 1:
        raise ValueError(
            f"{len(names)} client names for {len(offsets) - 1} clients: give one name per client"
        )
    empty = (offsets.diff() <= 0).nonzero()
    if len(empty):
        raise ValueError(
            f"client '{names[int(empty[0])]}' has no rows: leave it out, or give it at least one"
        )
    num_rows = int(offsets[-1])
    for name, values in fields.items():
        if len(values) != num_rows:
            raise ValueError(
                f"field '{name}' has {len(values)} rows, but the clients have {num_rows}"
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


def _check_features(fields: Mapping[str, Tensor], features: Mapping[str, tuple[str, ...]]) -> None:
    """Check that every column of a field with feature names has one."""
    for name, labels in features.items():
        if name not in fields or len(labels) != fields[name].shape[-1]:
            raise ValueError(
                f"features name {len(labels)} columns of '{name}': there is no such field, or its "
                "last dimension has another size"
            )
