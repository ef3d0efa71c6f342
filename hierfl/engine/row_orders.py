"""The order of each client's rows in each epoch, and the halves of them that a round works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.data.clients import ClientData

FEW_PLACES = 1 << 16  # clients x largest count: a table of so few is made at once, padding and all


@dataclass(eq=False)
class _Table:
    """Orders of clients with similar numbers of rows; those that were asked for last are kept."""

    members: Tensor
    keys: Tensor
    counts: Tensor
    asked: tuple[Tensor, Tensor] | None
    rows: Tensor

    def of(self, first: Tensor, last: Tensor) -> Tensor:
        """Return the orders of the epochs `first` (M,) to `last`: (epochs, M, largest count)."""
        later = range(1, int((last - first).max()) + 1)
        self.rows = torch.stack(
            [self._begun(first), *(self._shuffled(first + e, slice(None)) for e in later)]
        )
        self.asked = (first, last)
        return self.rows

    def _begun(self, epoch: Tensor) -> Tensor:
        """Return the orders of an epoch of each client; most are the last ones of the last call."""
        if self.asked is None:
            return self._shuffled(epoch, slice(None))
        first, last = self.asked
        rows = self.rows[last - first, torch.arange(len(first))]
        stale = last != epoch
        if bool(stale.any()):
            rows[stale] = self._shuffled(epoch, stale)
        return rows

    def _shuffled(self, epoch: Tensor, some: Tensor | slice) -> Tensor:
        keys = noise.fold_now(self.keys[some], epoch[some])
        return noise.permutations(keys, self.counts[some], int(self.counts.max()))


@dataclass(frozen=True, eq=False)
class Orders:
    """The order of each client's rows in an epoch, a function of its key and the epoch."""

    tables: tuple[_Table, ...]

    @staticmethod
    def of(keys: Tensor, counts: Tensor) -> Orders:
        """Return the orders of clients, in tables of similar lengths unless all are short."""
        few = len(counts) * int(counts.max()) <= FEW_PLACES
        kind = torch.zeros_like(counts) if few else counts.double().log2().floor().long()
        return Orders(
            tuple(_table((kind == k).nonzero()[:, 0], keys, counts) for k in kind.unique())
        )

    def at(self, epoch: Tensor, place: Tensor) -> Tensor:
        """Return which row of its client lies at a place (K, C, B) in an epoch (K, C)."""
        if not len(epoch):
            return place
        if len(self.tables) == 1:
            return _looked_up(self.tables[0], epoch, place)
        found = torch.empty_like(place)
        for table in self.tables:
            at = table.members
            found[:, at] = _looked_up(table, epoch[:, at], place[:, at])
        return found


def _table(members: Tensor, keys: Tensor, counts: Tensor) -> _Table:
    return _Table(members, keys[members], counts[members], None, counts.new_empty(0))


def _looked_up(table: _Table, epoch: Tensor, place: Tensor) -> Tensor:
    orders = table.of(epoch[0], epoch[-1])
    client = torch.arange(len(table.members))[None, :, None]
    return orders[(epoch - epoch[0])[..., None], client, place]


@dataclass(frozen=True, eq=False)
class Half:
    """One half of the rows of C clients: `counts` (C,), from place `first` of their orders on."""

    counts: Tensor
    first: Tensor
    orders: Orders

    def within(self, place: Tensor) -> Tensor:
        """Return which row of its client lies at a place in the half, (K, C, B) int64 both."""
        epoch = torch.zeros(place.shape[:2], dtype=torch.int64, device=place.device)
        return self.orders.at(epoch, place + self.first[:, None])


def half_of(
    data: ClientData, ids: Tensor, rows: Literal["support", "query"], *, seed: int, round_: int
) -> Half:
    """Return the support or the query of clients in a round; both are all rows.

    An odd number's support has one row more; a single row is in both.
    """
    counts = data.counts[ids]
    support = (counts + 1) // 2
    keys = noise.fold_now(data.keys[ids], seed, seed >> 32, noise.word("halves"), round_)
    orders = Orders.of(keys, counts)
    if rows == "support":
        return Half(support, torch.zeros_like(counts), orders)
    query = (counts - support).clamp(min=1)
    return Half(query, counts - query, orders)
