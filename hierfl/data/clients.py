"""`ClientData`: the rows of all clients by field, in flat tensors with offsets, unpadded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import spelled
from hierfl.data.arrays import Array, as_tensor
from hierfl.data.consistency import (
    check_consistent,
    feature_names,
    levels_without,
    mapping_of,
)
from hierfl.data.frames import Columns, Levels, parts_of_frame
from hierfl.data.grouping import (
    checked_fraction,
    chosen_clients,
    first_part,
    join_clients,
    positions_of,
    rows_kept,
    rows_of,
    sort_by_client,
)

OF_A_BATCH = ("clients", "data", "plate", "mask", "redrawn")  # that models call


@spelled
@dataclass(frozen=True, eq=False)
class ClientData:
    """The rows of N clients, one client after another.

    Args:
        fields: name -> Tensor (n, ...), n the rows of all clients together, sorted by client.
        offsets: (N + 1,) int64; client k owns the rows `offsets[k]:offsets[k + 1]`.
        names: the N clients' names, all different. They seed each client's noise, so no result
            depends on the order of the clients.
        client_fields: name -> Tensor (N, ...), one value per client (a county's uranium, a study's
            standard error).
        features: field -> names of the columns in its last dimension, for tables and for the
            coordinates of the posterior.
        levels: field -> names of its codes 0, 1, ..., if it was read from strings or categories;
            for a column of a field of several, "field[column]" -> names.

    Raises:
        TypeError: a field is no tensor of real numbers, or a name is not a string.
        ValueError: there is no field or no client; a client has no rows; `offsets` do not start at
            0; two clients, or a field and a client field, have the same name; a client's name is
            empty or the word for a missing value, has control characters, or looks like another's;
            a field requires a gradient or is not dense; or a length does not fit: of the names, of
            a field, of a client field or of a field's features or levels.
    """

    fields: Mapping[str, Tensor]
    offsets: Tensor
    names: tuple[str, ...]
    client_fields: Mapping[str, Tensor] = field(default_factory=dict)
    features: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the names, the offsets and the fields fit together."""
        check_consistent(
            self.fields, self.offsets, self.names, self.client_fields, self.features, self.levels
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without cached values that another thread may add to."""
        return {part.name: getattr(self, part.name) for part in dataclass_fields(self)}

    if not TYPE_CHECKING:  # hidden from type checkers, which would accept any misspelled name

        def __getattr__(self, name: str) -> Any:
            """Refuse a model that is run on the data: it is a function of a batch."""
            if not name.startswith("_") and name in OF_A_BATCH:
                raise AttributeError(
                    f"ClientData has no attribute '{name}', which a ClientBatch has: run a model "
                    "on hierfl.full_batch(data), as in pyro.render_model(model, "
                    "(hierfl.full_batch(data),))"
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
            client_id: (n,) integers or strings in any order: the client that each row belongs to.
                Rows keep their order within a client; clients are ordered by sorted id.
            names: with integer ids 0..N-1, the name of each client. By default the names are the
                ids as strings.
            client_fields: name -> (N, ...), in the order of the sorted ids.
            features: field -> names of the columns in its last dimension.
            **fields: name -> (n, ...).

        Raises:
            TypeError: ids that are neither integers nor strings, or of several kinds; a field that
                is not numeric.
            ValueError: as `ClientData`; or `client_id` is not (n,), or an id has no entry in
                `names`.

        >>> data = ClientData.from_arrays(["b", "a", "b"], y=[1.0, 2.0, 3.0])
        >>> data.names, data.counts.tolist(), data.fields["y"].tolist()
        (('a', 'b'), [1, 2], [2.0, 1.0, 3.0])
        """
        rows = sort_by_client(client_id, names, fields)
        own = mapping_of("client_fields", client_fields)
        return cls(
            fields=rows.fields,
            offsets=rows.offsets,
            names=rows.names,
            # cloned: the user's own tensors may change later
            client_fields={name: as_tensor(v, name).clone() for name, v in own.items()},
            features=feature_names(features),
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
            clients: name -> {field: (N_k, ...)}, or a list of such dicts; its clients are named
                "0", "1", ...
            client_fields: name -> (N, ...), in the order of the clients.
            features: field -> names of the columns in its last dimension.

        Raises:
            TypeError: a field is not numeric.
            ValueError: as `ClientData`; or a client has other fields than the first client, or rows
                of another shape.
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
    def from_frame(
        cls,
        frame: Any,
        client: str,
        *,
        client_fields: Mapping[str, Columns] | None = None,
        levels: Levels | None = None,
        **fields: Columns,
    ) -> ClientData:
        """Read a pandas frame, such as `from_frame(frame, "hospital", x=["age", "sex"], y="ill")`.

        Columns of strings or of categories are coded 0, 1, ...: categories in their own order,
        strings sorted. The names of the codes are kept in `levels`; pass them to code new data
        equally. Numbers remain what they are, also as categories.

        Args:
            frame: a pandas frame.
            client: the column that holds the client ids.
            client_fields: client field -> a column or a list of columns, constant within each
                client.
            levels: of other data, `train.levels`: the codes of its fields.
            **fields: field -> a column, for a field (n,), or a list of columns, for a field (n,
                columns) whose features are the columns' names.

        Raises:
            KeyError: the frame lacks a column.
            TypeError, ValueError: as `from_arrays`; or a column of strings or categories has
                missing values, levels that look alike, numbers written as strings, or a level that
                is not in `levels`; or a client field is not constant within a client.

        >>> import pandas as pd
        >>> frame = pd.DataFrame({"who": ["u", "v", "v"], "smokes": ["no", "yes", "no"], "beds": [9, 5, 5]})
        >>> data = ClientData.from_frame(frame, "who", x="smokes", client_fields={"beds": "beds"})
        >>> data.fields["x"].tolist(), data.levels["x"], data.client_fields["beds"].tolist()
        ([0, 1, 0], ('no', 'yes'), [9, 5])
        """
        own = mapping_of("client_fields", client_fields)
        return cls(**parts_of_frame(frame, client, fields, own, levels or {}))

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
        """Return the same clients with their rows on `device`, or `self` if they are there."""
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
        # Fills the cache of `keys`, which would hash the names again and leave the result on the
        # CPU.
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
            TypeError: `names` is a single string.
            KeyError: no client has one of the names.
        """
        return positions_of(self.names, names)

    def __repr__(self) -> str:
        """Return the counts of clients and rows and the row shape of each field, in one line."""
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
            TypeError: `clients` is a single name or position, or holds both.
            KeyError: no client has one of the names or positions.
            ValueError: a client is given twice, none is given, or a mask does not have N entries.
        """
        ids = chosen_clients(clients, self.names)
        counts = self.counts[ids]
        rows = rows_of(self.offsets[ids], counts)
        return replace(
            self,
            fields={name: v[rows] for name, v in self.fields.items()},
            offsets=torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]),
            names=tuple(self.names[int(i)] for i in ids),
            client_fields={name: v[ids] for name, v in self.client_fields.items()},
        )

    def where(self, keep: Tensor) -> ClientData:
        """Return the rows for which `keep` (n,) is true; clients that keep no row are dropped.

        Raises:
            TypeError: `keep` does not hold booleans.
            ValueError: `keep` is not (n,), or no row is kept.
        """
        keep = rows_kept(keep, self.num_rows)
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

        A field whose last dimension changes its size loses its feature names; a new field has no
        levels.

        Args:
            **fields: name -> (n, ...).

        Raises:
            ValueError: a field does not have n rows.
        """
        # cloned: the user's own tensors may change later
        new = {name: as_tensor(v, name).clone() for name, v in fields.items()}
        merged = {**self.fields, **new}
        kept = {
            n: f
            for n, f in self.features.items()
            if merged[n].dim() > 1 and merged[n].shape[-1] == len(f)
        }
        return replace(
            self, fields=merged, features=kept, levels=levels_without(self.levels, fields)
        )

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
            levels=levels_without(self.levels, names),
        )

    def split(self, fraction: float, *, seed: int) -> tuple[ClientData, ClientData]:
        """Split every client's own rows into two parts at random.

        Each part has at least one row of every client that has two or more. A client with a single
        row is in the first part alone. The draw depends on the seed and the client's name, not on
        the order of the clients.

        Args:
            fraction: share of each client's rows that goes to the first part, rounded to whole
                rows.
            seed: seed of the draw.

        Returns:
            The first part and the rest.

        Raises:
            TypeError: `seed` is no integer.
            ValueError: `fraction` is outside (0, 1), or every client has a single row.
        """
        checked_fraction(fraction, seed)
        keep = first_part(self.offsets, noise.fold(self.keys, noise.word("split"), seed), fraction)
        return self.where(keep), self.where(~keep)
