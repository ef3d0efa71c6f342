"""A cohort's rows, stacked: what a model and a guide are functions of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.poutine.mask_messenger import MaskMessenger
from torch import Tensor

from hierfl.core import noise
from hierfl.data.clients import ClientData

CLIENTS, DATA = "clients", "data"


@dataclass(frozen=True, eq=False)
class ClientBatch:
    """Rows of C clients, padded to B rows each.

    Args:
        fields: name -> Tensor (C, B, ...). Padding
            repeats the client's own first row: no row of one client ever stands in another's place.
        client_fields: name -> Tensor (C, 1, ...).
        rows: (C, B) bool, false at padding; None where there is none.
        counts: (C,) rows that each client has in all, in the dtype of the model; a batch of fewer stands for all of them.
        own_keys: (C, 2) int32, of the clients at this step; `root` (2,) int32, the key they share.
        words: folded into both: the draw. Keys are folded when a site is drawn, so a guide without noise pays nothing.
        is_mini_batch: the rows are some of the client's, scaled up to stand for all.

    A field is read as an attribute: `batch.x`.
    """

    fields: Mapping[str, Tensor]
    client_fields: Mapping[str, Tensor]
    rows: Tensor | None
    counts: Tensor
    own_keys: Tensor
    root: Tensor
    words: tuple[int | Tensor, ...] = ()
    is_mini_batch: bool = False

    def __getattr__(self, name: str) -> Any:
        """A field by its name."""
        if name.startswith("_"):
            raise AttributeError(name)
        for fields in (
            object.__getattribute__(self, "fields"),
            object.__getattribute__(self, "client_fields"),
        ):
            if name in fields:
                return fields[name]
        known = sorted([*self.fields, *self.client_fields])
        raise AttributeError(f"the data have no field '{name}'; they have {', '.join(known)}")

    @property
    def num_clients(self) -> int:
        """C."""
        return self.counts.shape[0]

    @property
    def num_rows(self) -> int:
        """B, padding counted."""
        return next(v.shape[1] for v in self.fields.values())

    @cached_property
    def _plates(self) -> dict[str, pyro.plate]:
        return {}

    def plate(self, name: str, size: int, dim: int) -> pyro.plate:
        """A plate that a program may open as often as it likes; Pyro's own may be made only once a trace."""
        if name not in self._plates:
            self._plates[name] = pyro.plate(name, size, dim=dim)
        return self._plates[name]

    def clients(self) -> pyro.plate:
        """The clients plate, dim -2: what is sampled inside is a client's own and never leaves it."""
        return self.plate(CLIENTS, self.num_clients, -2)

    @contextmanager
    def data(self) -> Iterator[object]:
        """The data plate, dim -1: padding masked, and a mini-batch scaled to stand for all rows of its client."""
        seen = self.num_rows if self.rows is None else self.rows.sum(-1, keepdim=True)
        scale = (self.counts[:, None] / seen) if self.is_mini_batch else 1.0
        with self.plate(DATA, self.num_rows, -1) as index, poutine.scale(scale=scale):
            if self.rows is None:
                yield index
            else:
                there: Any = self.rows
                with MaskMessenger(there):
                    yield index

    @cached_property
    def key(self) -> Tensor:
        """All that the noise inside the clients plate depends on, (C, 2) int32."""
        return noise.fold(self.own_keys, *self.words)

    @cached_property
    def shared_key(self) -> Tensor:
        """All that the noise outside the clients plate depends on, (2,) int32."""
        return noise.fold(self.root, *self.words)

    def redrawn(self, word: int | Tensor) -> ClientBatch:
        """The same rows with other noise: that of a step, or of a draw."""
        return replace(self, words=(*self.words, word))

    def mask(self) -> Tensor:
        """The rows that are there, (C, B) bool, with or without padding."""
        if self.rows is not None:
            return self.rows
        return torch.ones(
            self.num_clients, self.num_rows, dtype=torch.bool, device=self.counts.device
        )


def full_batch(
    data: ClientData, ids: Tensor, *, seed: int = 0, at: tuple[int, ...] = (0,)
) -> ClientBatch:
    """All rows of some clients, padded to the most that one of them has.

    Args:
        data: the federation.
        ids: (C,) int64, positions of the clients.
        seed: of the run.
        at: when in the run; with the seed and the client's name it makes the key of the noise.
    """
    counts = data.counts[ids]
    place = torch.arange(int(counts.max()))[None]
    inside = place < counts[:, None]
    index = data.offsets[ids][:, None] + torch.where(inside, place, 0)
    return gather(
        data, ids, index, None if bool(inside.all()) else inside, keys_of(data, ids, seed, *at)
    )


class Keys(NamedTuple):
    """What the noise of a step is a function of: (..., C, 2) int32, a key a client, and (..., 2) int32, the one they share."""

    own: Tensor
    shared: Tensor

    def folded(self, *words: int | Tensor) -> Keys:
        """The keys of what happens later: words are folded in, one after another."""
        return Keys(noise.fold_now(self.own, *words), noise.fold_now(self.shared, *words))

    def of_steps(self, count: int) -> list[Keys]:
        """The keys of steps 0, 1, ..., made at once."""
        step = torch.arange(count, dtype=torch.int32)
        own, shared = (
            noise.fold_now(self.own[None], step[:, None]),
            noise.fold_now(self.shared[None], step),
        )
        return [Keys(*both) for both in zip(own.unbind(), shared.unbind(), strict=True)]


def keys_of(data: ClientData, ids: Tensor, seed: int, *at: int) -> Keys:
    """Keys of some clients, and the one they share, at a time in the run."""
    return Keys(noise.fold_now(data.keys[ids], seed, seed >> 32), noise.root_key(seed)).folded(*at)


def gather(
    data: ClientData,
    ids: Tensor,
    index: Tensor,
    inside: Tensor | None,
    keys: Keys,
    *,
    is_mini_batch: bool = False,
) -> ClientBatch:
    """The one place where rows are gathered: `index` (C, B) says which, `inside` (C, B) which of them are no padding."""
    flat = index.flatten()  # index_select copies row by row: a third of the time of values[index]
    return ClientBatch(
        fields={
            name: values.index_select(0, flat).unflatten(0, index.shape)
            for name, values in data.fields.items()
        },
        client_fields={name: values[ids][:, None] for name, values in data.client_fields.items()},
        rows=inside,
        counts=data.counts[ids].to(torch.get_default_dtype()),
        own_keys=keys.own,
        root=keys.shared,
        is_mini_batch=is_mini_batch,
    )


def halves(batch: ClientBatch, size: int) -> tuple[ClientBatch, ClientBatch]:
    """Two batches of at most `size` rows in place of one of twice as many, of one client.

    The second goes on where the first ends, and from the front again where there are no more; a client with fewer rows than
    `size` has all of them in both. Which rows a client gets does not depend on those it is stacked with.
    """
    there = torch.as_tensor(batch.num_rows) if batch.rows is None else batch.rows.sum()
    place = torch.arange(size)
    mask = None if batch.rows is None and batch.num_rows >= size else (place < there)[None]

    def taken(index: Tensor) -> ClientBatch:
        fields = {n: v.index_select(1, index % there) for n, v in batch.fields.items()}
        return replace(batch, fields=fields, rows=mask)

    return taken(place), taken(size + place)
