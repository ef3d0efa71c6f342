"""`ClientData`: the rows of all clients by field, in flat tensors with offsets, unpadded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import expect, expect_integer, spelled
from hierfl.data.arrays import Array, as_tensor
from hierfl.data.consistency import (
    check_consistent,
    feature_names,
    field_of,
    levels_without,
    mapping_of,
    offsets_of,
    positions_of,
)
from hierfl.data.frames import Columns, FrameRows, Levels, frame_of, parts_of_frame
from hierfl.data.grouping import (
    chosen_clients,
    first_part,
    join_clients,
    rows_kept,
    rows_of,
    sort_by_client,
)

if TYPE_CHECKING:
    import pandas as pd

Change = Callable[[Tensor], Tensor]


@spelled
@dataclass(frozen=True, eq=False)
class ClientData:
    """The rows of N clients, one client after another.

    Args:
        fields: name -> Tensor (n, ...), n the rows of all clients together, sorted by client.
        offsets: (N + 1,) int64; client k owns the rows `offsets[k]:offsets[k + 1]`.
        names: the N clients' names, all different. They seed each client's noise, so no result
            depends on the order of the clients.
        client_fields: name -> Tensor (N, ...), one value per client, such as a county's uranium.
        features: field -> names of the columns in its last dimension, for tables and coordinates.
        levels: field, or "field[column]" -> names of its codes 0, 1, ..., if it was read from
            strings or categories.
        frame_rows: where the rows stand in the frame that a `hierfl.formula` read them from; what
            is given a frame answers in its order.
        client_column: of a frame in which each column is a field; other frames are read the same way.

    Raises:
        TypeError: a field is not a tensor of real numbers, or a name is not a string.
        ValueError: there is no field or no client; a client has no rows; `offsets` do not start at
            0; a name occurs twice, is empty, is the word for a missing value, has control
            characters, or looks like another's; a field requires a gradient or is not dense; or a
            length does not fit: of names, a field, a client field, features or levels.
    """

    fields: Mapping[str, Tensor]
    offsets: Tensor
    names: tuple[str, ...]
    client_fields: Mapping[str, Tensor] = field(default_factory=dict)
    features: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    frame_rows: FrameRows | None = field(default=None, repr=False)
    client_column: str = ""

    def __post_init__(self) -> None:
        """Check that the names, the offsets and the fields fit together."""
        check_consistent(
            self.fields, self.offsets, self.names, self.client_fields, self.features, self.levels
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without cached values that another thread may add to."""
        return {part.name: getattr(self, part.name) for part in dataclass_fields(self)}

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
            names: with integer ids 0..N-1, the name of each client. Default: the ids as strings.
            client_fields: name -> (N, ...), in the order of the sorted ids.
            features: field -> names of the columns in its last dimension.
            **fields: name -> (n, ...).

        Raises:
            TypeError: ids that are neither integers nor strings, or of several kinds; a field that
                is not numeric.
            ValueError: as `ClientData`; `client_id` is not (n,), or an id has no entry in `names`.

        >>> data = ClientData.from_arrays(["b", "a", "b"], y=[1.0, 2.0, 3.0])
        >>> data.names, data.counts.tolist(), data.fields["y"].tolist()
        (('a', 'b'), [1, 2], [2.0, 1.0, 3.0])
        """
        rows = sort_by_client(client_id, names, fields)
        own = mapping_of("client_fields", client_fields)
        # cloned: the user's own tensors may change later
        cloned = {name: as_tensor(v, name).clone() for name, v in own.items()}
        labels = feature_names(features)
        return cls(**rows._asdict(), client_fields=cloned, features=labels)

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
            clients: name -> {field: (N_k, ...)}, or a list of such dicts, named "0", "1", ...
            client_fields: name -> (N, ...), in the order of the clients.
            features: field -> names of the columns in its last dimension.

        Raises:
            TypeError: a field is not numeric.
            ValueError: as `ClientData`; or a client's fields, or the shape of its rows, are not
                those of the first client.
        """
        ids, names, fields = join_clients(clients)
        options: Any = {"client_fields": client_fields, "features": features, **fields}
        return cls.from_arrays(ids, names=names, **options)

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

        Without fields each column is one, of its own name: `from_frame(frame, "hospital")`.

        Columns of strings or of categories are coded 0, 1, ...: categories in their own order,
        strings sorted. Their names are kept in `levels`; pass them to code new data equally.
        Numbers remain what they are, also as categories.

        Args:
            frame: a pandas frame.
            client: the column that holds the client ids.
            client_fields: client field -> a column or a list of columns, constant within a client.
            levels: of other data, `train.levels`: the codes of its fields.
            **fields: field -> a column, for a field (n,), or a list of columns, for a field (n,
                columns) whose features are the columns' names.

        Raises:
            KeyError: the frame lacks a column.
            TypeError, ValueError: as `from_arrays`; or a column of strings or categories has
                missing values, levels that look alike, numbers written as strings, or a level that
                is not in `levels`; or a client field is not constant within a client.

        >>> import pandas as pd
        >>> frame = pd.DataFrame({"who": ["u", "v", "v"], "smokes": ["no", "yes", "no"]})
        >>> data = ClientData.from_frame(frame.assign(beds=[9, 5, 5]), "who", x="smokes",
        ...                              client_fields={"beds": "beds"})
        >>> data.fields["x"].tolist(), data.levels["x"], data.client_fields["beds"].tolist()
        ([0, 1, 0], ('no', 'yes'), [9, 5])
        """
        own = mapping_of("client_fields", client_fields)
        return cls(**parts_of_frame(frame, client, fields, own, levels or {}))

    def frame(self, client: str = "client") -> pd.DataFrame:
        """Return the rows as a pandas frame, as `from_frame` reads one; the column `client` has their names."""
        return frame_of(self, client)

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
        tensors = (self.offsets, *self.fields.values(), *self.client_fields.values())
        if set(map(attrgetter("device"), tensors)) == {device}:
            return self
        copy = self.with_values(lambda v: v.to(device), offsets=self.offsets.to(device))
        # `keys` is cached: it would hash the names again and leave the result on the CPU
        copy.__dict__["keys"] = self.keys.to(device)
        return copy

    @cached_property
    def by_name(self) -> Tensor:
        """Positions of the clients in the order of their names, (N,) int64."""
        return torch.tensor(sorted(range(self.num_clients), key=self.names.__getitem__))

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
        shapes = ", ".join(
            f"{n}: {tuple(v.shape[1:])}" for n, v in {**self.fields, **self.client_fields}.items()
        )
        return f"ClientData({self.num_clients} clients, {self.num_rows} rows, {shapes})"

    def select(self, clients: Iterable[str] | Iterable[int] | Tensor) -> ClientData:
        """Return some of the clients, in the order given.

        Args:
            clients: their names, their positions, or a boolean mask (N,).

        Raises:
            TypeError: `clients` is a single name or position.
            KeyError: no client has one of the names or positions.
            ValueError: a client is given twice, or none is given.
        """
        ids = chosen_clients(clients, self.names)
        counts = self.counts[ids]
        return self._some(ids, counts, rows_of(self.offsets[ids], counts))

    def _some(self, ids: Tensor, counts: Tensor, rows: Tensor) -> ClientData:
        return self.with_values(
            lambda v: v[rows],
            lambda v: v[ids],
            offsets=offsets_of(counts),
            names=tuple(map(self.names.__getitem__, ids.tolist())),
            frame_rows=self.frame_rows and self.frame_rows.kept(rows),
        )

    def with_values(
        self, of_rows: Change, of_clients: Change | None = None, **changes: Any
    ) -> ClientData:
        """Return the same clients with a function of each field and client field in its place."""
        fields = {name: of_rows(v) for name, v in self.fields.items()}
        own = {name: (of_clients or of_rows)(v) for name, v in self.client_fields.items()}
        return replace(self, fields=fields, client_fields=own, **changes)

    def where(self, keep: Tensor) -> ClientData:
        """Return the rows for which `keep` (n,) is true; clients that keep no row are dropped.

        Raises:
            ValueError: `keep` is not (n,) of booleans, or no row is kept.
        """
        keep = rows_kept(keep, self.num_rows)
        counts = torch.bincount(self.row_client[keep], minlength=self.num_clients)
        ids = counts.nonzero()[:, 0]
        return self._some(ids, counts[ids], keep)

    def with_fields(self, **fields: Tensor) -> ClientData:
        """Return the same clients with fields (n, ...) added or replaced.

        A field whose last dimension changes its size loses its feature names; a new field has no
        levels.

        Raises:
            ValueError: a field does not have n rows.
        """
        # cloned: the user's own tensors may change later
        merged = {**self.fields, **{name: as_tensor(v, name).clone() for name, v in fields.items()}}
        features = {
            name: labels
            for name, labels in self.features.items()
            if merged[name].dim() > 1 and merged[name].shape[-1] == len(labels)
        }
        levels = levels_without(self.levels, fields)
        return replace(self, fields=merged, features=features, levels=levels)

    def without(self, *names: str) -> ClientData:
        """Return the same clients without some fields, for example without their labels.

        Raises:
            KeyError: there is no such field.
        """
        for name in names:
            field_of(self.fields, name)
        fields = {name: v for name, v in self.fields.items() if name not in names}
        features = {name: v for name, v in self.features.items() if name not in names}
        levels = levels_without(self.levels, names)
        return replace(self, fields=fields, features=features, levels=levels)

    def split(self, fraction: float, *, seed: int) -> tuple[ClientData, ClientData]:
        """Split every client's own rows into two parts at random.

        Each part has at least one row of every client that has two or more; a single row is in the
        first. The draw depends on the seed and the client's name, not on the order of the clients.

        Args:
            fraction: share of each client's rows in the first part, rounded to whole rows.
            seed: seed of the draw.

        Returns:
            The first part and the other one.

        Raises:
            TypeError: `seed` is not an integer.
            ValueError: `fraction` is outside (0, 1), or every client has a single row.
        """
        expect(fraction=(fraction, "(0, 1)"))
        expect_integer(seed, "seed")
        keep = first_part(self.offsets, noise.fold(self.keys, noise.word("split"), seed), fraction)
        return self.where(keep), self.where(~keep)
