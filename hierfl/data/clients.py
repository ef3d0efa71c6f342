"""Ragged clients at rest: flat tensors and offsets, no padding, any number of named fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hierfl.core import noise

Array = Any  # whatever torch.as_tensor takes: a tensor, a NumPy array, a list of numbers


def as_tensor(values: Array, name: str) -> Tensor:
    """Return `values` as a tensor: floats in torch's default dtype, integers as int64, booleans as they are."""
    try:
        tensor = (
            values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
        )  # a copy: pandas hands out read-only ones
    except (TypeError, ValueError) as error:
        raise TypeError(f"field '{name}' is not numeric ({error}); encode it as numbers") from error
    if tensor.dim() == 0:
        raise ValueError(f"field '{name}' is a single number; give one a row, or one a client")
    if tensor.is_floating_point():
        return tensor.to(torch.get_default_dtype())
    if tensor.is_complex():
        raise TypeError(
            f"field '{name}' is complex; give its real and imaginary parts as two fields"
        )
    return tensor if tensor.dtype == torch.bool else tensor.long()


@dataclass(frozen=True, eq=False)
class ClientData:
    """The rows of N clients, client after client.

    Args:
        fields: name -> Tensor (n, ...), n the rows of all clients together, sorted by client.
        offsets: Tensor (N + 1,), int64; client k owns the rows `offsets[k]:offsets[k + 1]`.
        names: the N clients' names, no two alike. They seed each client's noise, so no result depends on their order.
        client_fields: name -> Tensor (N, ...), one value a client (a county's uranium, a study's standard error).
        features: field -> names of its last dimension, for tables and for the posterior's coordinates.

    Raises:
        ValueError: a client without rows, two clients of one name, a field of another length, two fields of one name.
    """

    fields: Mapping[str, Tensor]
    offsets: Tensor
    names: tuple[str, ...]
    client_fields: Mapping[str, Tensor] = field(default_factory=dict)
    features: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no client can have."""
        if not self.fields:
            raise ValueError("no field was given: name at least one, such as x=... or y=...")
        if len(set(self.names)) < len(self.names):
            repeated = Counter(self.names).most_common(1)[0][0]
            raise ValueError(f"two clients are named '{repeated}': client names must be unique")
        if len(self.offsets) != len(self.names) + 1:
            raise ValueError(f"{len(self.names)} client names for {len(self.offsets) - 1} clients")
        empty = (self.counts <= 0).nonzero()
        if len(empty):
            raise ValueError(
                f"client '{self.names[int(empty[0])]}' has no rows: leave it out, or give it at least one"
            )
        for name, values in self.fields.items():
            if len(values) != self.num_rows:
                raise ValueError(
                    f"field '{name}' has {len(values)} rows, the clients have {self.num_rows}"
                )
        for name, values in self.client_fields.items():
            if name in self.fields:
                raise ValueError(
                    f"'{name}' is both a field of rows and a field of clients: rename one"
                )
            if len(values) != self.num_clients:
                raise ValueError(
                    f"client field '{name}' has {len(values)} values for {self.num_clients} clients"
                )
        for name, labels in self.features.items():
            if name not in self.fields or len(labels) != self.fields[name].shape[-1]:
                raise ValueError(
                    f"features name {len(labels)} columns of '{name}', which has not as many"
                )

    def __getstate__(self) -> dict[str, Any]:
        """What another process is sent: not what is cached, which may be growing meanwhile."""
        return {part.name: getattr(self, part.name) for part in dataclass_fields(self)}

    # ------------------------------------------------------------------ made from
    @classmethod
    def from_arrays(
        cls,
        client_id: Array,
        *,
        names: Sequence[str] | None = None,
        client_fields: Mapping[str, Array] | None = None,
        features: Mapping[str, Sequence[str]] | None = None,
        **fields: Array,
    ) -> ClientData:
        """Group rows by client.

        Args:
            client_id: (n,) which client a row belongs to: integers or strings, in any order. The order of rows within a
                client is kept; clients come in the order of their sorted ids.
            names: with integer ids 0..N-1, the name of each; without, the ids themselves, as strings.
            client_fields: name -> (N, ...), in the order of the sorted ids.
            features: field -> names of its last dimension.
            **fields: name -> (n, ...).

        Raises:
            ValueError: as `ClientData`; or ids that are not one a row, or ids that `names` does not reach.

        >>> data = ClientData.from_arrays(["b", "a", "b"], y=[1.0, 2.0, 3.0])
        >>> data.names, data.counts.tolist(), data.fields["y"].tolist()
        (('a', 'b'), [1, 2], [2.0, 1.0, 3.0])
        """
        raw = np.asarray(client_id)
        if raw.ndim != 1:
            raise ValueError(
                f"client_id has shape {raw.shape}; one id a row is needed: ({len(raw)},)"
            )
        if raw.dtype.kind == "f" or (raw.dtype.kind == "O" and len({type(i) for i in raw}) > 1):
            raise TypeError(
                "client_id must be integers or strings, all of one kind, none missing (NaN)"
            )
        ids, inverse, counts = np.unique(raw, return_inverse=True, return_counts=True)
        labels = tuple(str(i) for i in ids)
        if names is not None:
            if raw.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= len(names):
                raise ValueError(
                    f"`names` has {len(names)} entries; ids must be integers 0..{len(names) - 1}"
                )
            absent = sorted(set(range(len(names))) - set(ids.tolist()))
            if absent:
                raise ValueError(
                    f"client '{names[absent[0]]}' has no rows: leave it out, or give it at least one"
                )
            labels = tuple(str(n) for n in names)
        order = torch.as_tensor(np.argsort(inverse, kind="stable"))
        tensors = {name: as_tensor(values, name) for name, values in fields.items()}
        for name, values in tensors.items():
            if len(values) != len(raw):
                raise ValueError(
                    f"field '{name}' has shape {tuple(values.shape)}; client_id has {len(raw)} rows"
                )
        return cls(
            fields={name: values[order] for name, values in tensors.items()},
            offsets=torch.as_tensor(np.concatenate([[0], np.cumsum(counts)])),
            names=labels,
            client_fields={name: as_tensor(v, name) for name, v in (client_fields or {}).items()},
            features={name: tuple(map(str, v)) for name, v in (features or {}).items()},
        )

    @classmethod
    def from_clients(
        cls,
        clients: Mapping[str, Mapping[str, Array]] | Sequence[Mapping[str, Array]],
        *,
        client_fields: Mapping[str, Array] | None = None,
        features: Mapping[str, Sequence[str]] | None = None,
    ) -> ClientData:
        """Join per-client arrays: name -> {field: (N_k, ...)}, or a list of such (named "0", "1", ...).

        Raises:
            ValueError: as `ClientData`; or a client that lacks a field, or has it in another shape than the first client.
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
                    f"client '{client}' has the fields {sorted(own)}; the first client has {sorted(columns)}"
                )
            tensors = {name: as_tensor(values, f"{client}.{name}") for name, values in own.items()}
            lengths = {name: len(values) for name, values in tensors.items()}
            if len(set(lengths.values())) != 1:
                raise ValueError(f"client '{client}' has fields of different lengths: {lengths}")
            for name, values in tensors.items():
                if columns[name] and columns[name][0].shape[1:] != values.shape[1:]:
                    found, wanted = tuple(values.shape[1:]), tuple(columns[name][0].shape[1:])
                    raise ValueError(
                        f"client '{client}': a row of '{name}' has shape {found}, the first client's {wanted}"
                    )
                columns[name].append(values)
            counts.append(next(iter(lengths.values())))
        ids = np.repeat(np.arange(len(named)), counts)
        joined = {name: torch.cat(parts) for name, parts in columns.items()}
        return cls.from_arrays(
            ids, names=list(named), client_fields=client_fields, features=features, **joined
        )

    @classmethod
    def from_frame(cls, frame: Any, client: str, **fields: str | Sequence[str]) -> ClientData:
        """Read a pandas frame: `from_frame(frame, "hospital", x=["age", "sex"], y="ill")`.

        A list of columns makes a field (n, columns) whose features are their names; one column makes a field (n,).

        Raises:
            KeyError: a column that the frame has not.
        """
        wanted = [client, *(c for v in fields.values() for c in ([v] if isinstance(v, str) else v))]
        missing = [c for c in wanted if c not in frame.columns]
        if missing:
            raise KeyError(f"the frame has no column '{missing[0]}'; it has {list(frame.columns)}")
        arrays = {
            name: frame[v if isinstance(v, str) else list(v)].to_numpy()
            for name, v in fields.items()
        }
        lists = {name: tuple(v) for name, v in fields.items() if not isinstance(v, str)}
        return cls.from_arrays(frame[client].to_numpy(), features=lists, **arrays)

    # ------------------------------------------------------------------ what it holds
    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.names)

    @property
    def num_rows(self) -> int:
        """Rows of all clients together."""
        return int(self.offsets[-1])

    @property
    def counts(self) -> Tensor:
        """Rows of each client, (N,) int64."""
        return self.offsets.diff()

    @cached_property
    def keys(self) -> Tensor:
        """The clients' noise keys, (N, 2) int32, made of their names."""
        return noise.client_keys(self.names)

    def to(self, device: torch.device) -> ClientData:
        """The same clients with their rows on a device; where all is there already, these themselves."""
        if all(
            values.device == device
            for values in (self.offsets, *self.fields.values(), *self.client_fields.values())
        ):
            return self
        fields, client_fields = (
            {name: v.to(device) for name, v in of.items()}
            for of in (self.fields, self.client_fields)
        )
        there = replace(
            self, fields=fields, client_fields=client_fields, offsets=self.offsets.to(device)
        )
        there.__dict__["keys"] = self.keys.to(device)  # what `keys` would find
        return there

    @cached_property
    def by_name(self) -> Tensor:
        """Positions of the clients in the order of their names, (N,) int64."""
        return torch.tensor(
            sorted(range(self.num_clients), key=self.names.__getitem__), dtype=torch.long
        )

    @property
    def row_client(self) -> Tensor:
        """The index of the client of each row, (n,) int64."""
        return torch.repeat_interleave(torch.arange(self.num_clients), self.counts)

    def index(self, names: Iterable[str]) -> Tensor:
        """Positions of clients by name, (len(names),) int64.

        Raises:
            KeyError: a name that no client has.
        """
        place = {name: i for i, name in enumerate(self.names)}
        wanted = [str(n) for n in names]
        unknown = [n for n in wanted if n not in place]
        if unknown:
            raise KeyError(
                f"unknown client '{unknown[0]}'; there are {', '.join(self.names[:8])}"
                + (", ..." if len(place) > 8 else "")
            )
        return torch.tensor([place[n] for n in wanted], dtype=torch.long)

    def __repr__(self) -> str:
        """Clients, rows and fields in one line."""
        shapes = ", ".join(
            f"{n}: {tuple(v.shape[1:])}" for n, v in {**self.fields, **self.client_fields}.items()
        )
        return f"ClientData({self.num_clients} clients, {self.num_rows} rows, {shapes})"

    # ------------------------------------------------------------------ made into
    def select(self, clients: Iterable[str] | Iterable[int] | Tensor) -> ClientData:
        """Some of the clients, in the order given, by name, by position, or by a boolean mask (N,)."""
        if isinstance(clients, Tensor) and clients.dtype == torch.bool:
            clients = clients.nonzero()[:, 0]
        chosen = clients.tolist() if isinstance(clients, Tensor) else list(clients)
        ids = (
            self.index(chosen)
            if chosen and isinstance(chosen[0], str)
            else torch.tensor(chosen, dtype=torch.long)
        )
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.num_clients):
            raise KeyError(f"client position out of range: there are {self.num_clients} clients")
        counts = self.counts[ids]
        within = torch.arange(int(counts.sum())) - torch.repeat_interleave(
            counts.cumsum(0) - counts, counts
        )
        rows = torch.repeat_interleave(self.offsets[ids], counts) + within
        return replace(
            self,
            fields={name: v[rows] for name, v in self.fields.items()},
            offsets=torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]),
            names=tuple(self.names[int(i)] for i in ids),
            client_fields={name: v[ids] for name, v in self.client_fields.items()},
        )

    def where(self, keep: Tensor) -> ClientData:
        """The rows for which `keep` (n,) is true; clients left without rows are left out."""
        keep = keep.bool()
        counts = torch.zeros(self.num_clients, dtype=torch.long).index_add_(
            0, self.row_client, keep.long()
        )
        left = counts > 0
        return replace(
            self,
            fields={name: v[keep] for name, v in self.fields.items()},
            offsets=torch.cat([torch.zeros(1, dtype=torch.long), counts[left].cumsum(0)]),
            names=tuple(n for n, k in zip(self.names, left.tolist(), strict=True) if k),
            client_fields={name: v[left] for name, v in self.client_fields.items()},
        )

    def with_fields(self, **fields: Tensor) -> ClientData:
        """The same clients with fields of rows added or replaced; one that changes its width loses its feature names."""
        merged = {**self.fields, **{name: as_tensor(v, name) for name, v in fields.items()}}
        kept = {
            n: f
            for n, f in self.features.items()
            if merged[n].dim() > 1 and merged[n].shape[-1] == len(f)
        }
        return replace(self, fields=merged, features=kept)

    def without(self, *names: str) -> ClientData:
        """The same clients without some fields (without their labels, say)."""
        for name in names:
            if name not in self.fields:
                raise KeyError(f"there is no field '{name}'; there are {sorted(self.fields)}")
        return replace(
            self,
            fields={n: v for n, v in self.fields.items() if n not in names},
            features={n: v for n, v in self.features.items() if n not in names},
        )

    def split(self, fraction: float, *, seed: int) -> tuple[ClientData, ClientData]:
        """Split every client's own rows: (`fraction` of them, rounded; the rest), at random.

        Each part has at least one row of every client that has two; a client with a single row is in the first part alone.
        The draw depends on (seed, client name), not on the order of clients.

        Raises:
            ValueError: a fraction outside (0, 1).
        """
        if not 0.0 < fraction < 1.0:
            raise ValueError(f"fraction is {fraction}; it must lie between 0 and 1")
        keys = noise.fold(self.keys, noise.word("split"), seed)
        counts = self.counts
        first = (counts * fraction).round().long().clamp(min=1)
        first = torch.minimum(first, (counts - 1).clamp(min=1))
        keep = torch.zeros(self.num_rows, dtype=torch.bool)
        for k, own in enumerate(self.offsets[:-1].tolist()):
            order = noise.permutations(keys[k : k + 1], counts[k : k + 1], int(counts[k]))[0]
            keep[own + order[: int(first[k])]] = True
        return self.where(keep), self.where(~keep)
