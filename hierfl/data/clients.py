"""`ClientData`: the rows of all clients under named fields, in flat tensors with offsets, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.data.arrays import (
    Array,
    as_tensor,
    check_consistent,
    join_clients,
    read_frame,
    sort_by_client,
)

OF_A_BATCH = ("clients", "data", "plate", "mask", "redrawn")  # that models call


@dataclass(frozen=True, eq=False)
class ClientData:
    """The rows of N clients, one client after another.

    Args:
        fields: name -> Tensor (n, ...), n the rows of all clients together, sorted by client.
        offsets: (N + 1,) int64; client k owns the rows `offsets[k]:offsets[k + 1]`.
        names: the N clients' names, all different. They seed each client's noise, so no result depends on the
            order of the clients.
        client_fields: name -> Tensor (N, ...), one value per client (a county's uranium, a study's standard
            error).
        features: field -> names of the columns in its last dimension, for tables and for the coordinates of
            the posterior.

    Raises:
        ValueError: there is no field; a client has no rows; two clients, or a field and a client field, have
            the same name; or a length does not fit: of the names, of a field, of a client field or of a
            field's features.
    """

    fields: Mapping[str, Tensor]
    offsets: Tensor
    names: tuple[str, ...]
    client_fields: Mapping[str, Tensor] = field(default_factory=dict)
    features: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the names, the offsets and the fields fit together."""
        check_consistent(self.fields, self.offsets, self.names, self.client_fields, self.features)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: no cached values, which another thread may be adding to meanwhile."""
        return {part.name: getattr(self, part.name) for part in dataclass_fields(self)}

    if not TYPE_CHECKING:  # hidden from type checkers, which would accept any misspelt name

        def __getattr__(self, name: str) -> Any:
            """Refuse a model that is run on the data: it is a function of a batch."""
            if not name.startswith("_") and name in OF_A_BATCH:
                raise AttributeError(
                    f"ClientData has no attribute '{name}', which a ClientBatch has: run a model on "
                    f"hierfl.full_batch(data), as in pyro.render_model(model, (hierfl.full_batch(data),))"
                )
            raise AttributeError(f"ClientData has no attribute '{name}'")

    # ------------------------------------------------------------------ constructors
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
            client_id: (n,) integers or strings in any order: the client that each row belongs to. Rows keep
                their order within a client; clients are ordered by sorted id.
            names: with integer ids 0..N-1, the name of each client. By default the names are the ids as
                strings.
            client_fields: name -> (N, ...), in the order of the sorted ids.
            features: field -> names of the columns in its last dimension.
            **fields: name -> (n, ...).

        Raises:
            TypeError: ids that are neither integers nor strings, or of several kinds; a field that is not
                numeric.
            ValueError: as `ClientData`; or `client_id` is not (n,), or an id has no entry in `names`.

        >>> data = ClientData.from_arrays(["b", "a", "b"], y=[1.0, 2.0, 3.0])
        >>> data.names, data.counts.tolist(), data.fields["y"].tolist()
        (('a', 'b'), [1, 2], [2.0, 1.0, 3.0])
        """
        rows = sort_by_client(client_id, names, fields)
        return cls(
            fields=rows.fields,
            offsets=rows.offsets,
            names=rows.names,
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
        """Join arrays that are given client by client.

        Args:
            clients: name -> {field: (N_k, ...)}, or a list of such dicts; its clients are named "0", "1", ...
            client_fields: name -> (N, ...), in the order of the clients.
            features: field -> names of the columns in its last dimension.

        Raises:
            TypeError: a field is not numeric.
            ValueError: as `ClientData`; or a client has other fields than the first client, or rows of
                another shape.
        """
        rows = join_clients(clients)
        return cls.from_arrays(
            rows.client_id,
            names=rows.names,
            client_fields=client_fields,
            features=features,
            **rows.fields,
        )

    @classmethod
    def from_frame(cls, frame: Any, client: str, **fields: str | Sequence[str]) -> ClientData:
        """Read a pandas frame, such as `from_frame(frame, "hospital", x=["age", "sex"], y="ill")`.

        Args:
            frame: a pandas frame.
            client: the column that holds the client ids.
            **fields: field -> a column, for a field (n,), or a list of columns, for a field (n, columns)
                whose features are the columns' names.

        Raises:
            KeyError: the frame lacks a column.
            TypeError, ValueError: as `from_arrays`.
        """
        arrays, features = read_frame(frame, client, fields)
        return cls.from_arrays(frame[client].to_numpy(), features=features, **arrays)

    # ------------------------------------------------------------------ contents
    @property
    def num_clients(self) -> int:
        """N, the number of clients."""
        return len(self.names)

    @property
    def num_rows(self) -> int:
        """Number of rows of all clients together."""
        return int(self.offsets[-1])

    @property
    def counts(self) -> Tensor:
        """Number of rows of each client, (N,) int64."""
        return self.offsets.diff()

    @cached_property
    def keys(self) -> Tensor:
        """The clients' noise keys, (N, 2) int32, hashed from their names."""
        return noise.client_keys(self.names)

    def to(self, device: torch.device) -> ClientData:
        """Return the same clients with their rows on `device`, or `self` if all of them are there already."""
        if all(
            values.device == device
            for values in (self.offsets, *self.fields.values(), *self.client_fields.values())
        ):
            return self
        fields, client_fields = (
            {name: v.to(device) for name, v in of.items()}
            for of in (self.fields, self.client_fields)
        )
        copy = replace(
            self, fields=fields, client_fields=client_fields, offsets=self.offsets.to(device)
        )
        # Fills the cache of `keys`, which would hash the names again and leave the result on the CPU.
        copy.__dict__["keys"] = self.keys.to(device)
        return copy

    @cached_property
    def by_name(self) -> Tensor:
        """Positions of the clients in the order of their names, (N,) int64."""
        return torch.tensor(
            sorted(range(self.num_clients), key=self.names.__getitem__), dtype=torch.long
        )

    @property
    def row_client(self) -> Tensor:
        """Position of the client that each row belongs to, (n,) int64."""
        return torch.repeat_interleave(torch.arange(self.num_clients), self.counts)

    def index(self, names: Iterable[str]) -> Tensor:
        """Return the positions of the clients named, (len(names),) int64.

        Raises:
            KeyError: no client has one of the names.
        """
        place = {name: i for i, name in enumerate(self.names)}
        wanted = [str(n) for n in names]
        unknown = [n for n in wanted if n not in place]
        if unknown:
            raise KeyError(
                f"unknown client '{unknown[0]}': the clients are {', '.join(self.names[:8])}"
                + (", ..." if len(place) > 8 else "")
            )
        return torch.tensor([place[n] for n in wanted], dtype=torch.long)

    def __repr__(self) -> str:
        """Return the numbers of clients and rows, and the shape of a row in each field, in one line."""
        shapes = ", ".join(
            f"{n}: {tuple(v.shape[1:])}" for n, v in {**self.fields, **self.client_fields}.items()
        )
        return f"ClientData({self.num_clients} clients, {self.num_rows} rows, {shapes})"

    # ------------------------------------------------------------------ subsets and changed fields
    def select(self, clients: Iterable[str] | Iterable[int] | Tensor) -> ClientData:
        """Return some of the clients, in the order given.

        Args:
            clients: their names, their positions, or a boolean mask (N,).

        Raises:
            KeyError: no client has one of the names or positions.
            ValueError: a client is given twice.
        """
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
        """Return the rows for which `keep` (n,) is true; clients that keep no row are dropped."""
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
        """Return the same clients with fields added or replaced.

        A field whose last dimension changes its size loses its feature names.

        Args:
            **fields: name -> (n, ...).

        Raises:
            ValueError: a field does not have n rows.
        """
        merged = {**self.fields, **{name: as_tensor(v, name) for name, v in fields.items()}}
        kept = {
            n: f
            for n, f in self.features.items()
            if merged[n].dim() > 1 and merged[n].shape[-1] == len(f)
        }
        return replace(self, fields=merged, features=kept)

    def without(self, *names: str) -> ClientData:
        """Return the same clients without some fields, for example without their labels.

        Raises:
            KeyError: there is no such field.
        """
        for name in names:
            if name not in self.fields:
                raise KeyError(f"there is no field '{name}': the fields are {sorted(self.fields)}")
        return replace(
            self,
            fields={n: v for n, v in self.fields.items() if n not in names},
            features={n: v for n, v in self.features.items() if n not in names},
        )

    def split(self, fraction: float, *, seed: int) -> tuple[ClientData, ClientData]:
        """Split every client's own rows into two parts at random.

        Each part has at least one row of every client that has two or more. A client with a single row is in
        the first part alone. The draw depends on the seed and the client's name, not on the order of the
        clients.

        Args:
            fraction: share of each client's rows that goes to the first part, rounded to whole rows.
            seed: seed of the draw.

        Returns:
            The first part and the rest.

        Raises:
            ValueError: `fraction` is outside (0, 1).
        """
        if not 0.0 < fraction < 1.0:
            raise ValueError(f"fraction is {fraction}: it must lie between 0 and 1")
        keys = noise.fold(self.keys, noise.word("split"), seed)
        counts = self.counts
        first = (counts * fraction).round().long().clamp(min=1)
        first = torch.minimum(first, (counts - 1).clamp(min=1))
        keep = torch.zeros(self.num_rows, dtype=torch.bool)
        for k, own in enumerate(self.offsets[:-1].tolist()):
            order = noise.permutations(keys[k : k + 1], counts[k : k + 1], int(counts[k]))[0]
            keep[own + order[: int(first[k])]] = True
        return self.where(keep), self.where(~keep)
