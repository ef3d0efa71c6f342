"""The order of each client's rows in each epoch, without padding every client to the one with most rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hierfl.core import noise

FEW_PLACES = 1 << 16  # clients x largest count: a table of so few is made at once, padding and all


@dataclass(eq=False)
class _Table:
    """Orders of clients with similar numbers of rows; each client's newest one is kept.

    Args:
        members: (M,) int64, the clients' places in the chunk.
        keys: (M, 2) int32, of the clients' orders.
        counts: (M,) int64, their numbers of rows.
        epoch: (M,) int64, of the orders that are kept; -1: none yet.
        kept: (M, largest count) int64.
    """

    members: Tensor
    keys: Tensor
    counts: Tensor
    epoch: Tensor
    kept: Tensor

    def of(self, first: Tensor, last: Tensor) -> Tensor:
        """Return the orders of the epochs `first` to `last` of each client (M,): (epochs, M, largest count)."""
        stale = self.epoch != first
        if bool(stale.any()):
            self.kept[stale] = self._shuffled(first, stale)
        later = range(1, int((last - first).max()) + 1)
        rows = torch.stack([self.kept, *(self._shuffled(first + e) for e in later)])
        self.epoch, self.kept = last, rows[last - first, torch.arange(len(first))]
        return rows

    def _shuffled(self, epoch: Tensor, some: Tensor | slice = slice(None)) -> Tensor:
        keys = noise.fold_now(self.keys[some], epoch[some])
        return noise.permutations(keys, self.counts[some], self.kept.shape[1])


@dataclass(frozen=True, eq=False)
class Orders:
    """The order of each client's rows in each epoch: a function of the client's key and the epoch.

    Args:
        tables: of clients whose numbers of rows differ by less than a factor of 2, or of all clients where
            the numbers are small: padding then costs less than several tables do.
    """

    tables: tuple[_Table, ...]

    @staticmethod
    def of(keys: Tensor, counts: Tensor) -> Orders:
        """Return the orders of C clients.

        Args:
            keys: (C, 2) int32.
            counts: (C,) int64, the clients' numbers of rows.
        """
        few = len(counts) * int(counts.max()) <= FEW_PLACES
        kind = torch.zeros_like(counts) if few else counts.double().log2().floor().long()
        return Orders(
            tuple(_table((kind == k).nonzero()[:, 0], keys, counts) for k in kind.unique())
        )

    def at(self, epoch: Tensor, place: Tensor) -> Tensor:
        """Return which row of its client lies at a place in the order of an epoch.

        Args:
            epoch: (K, C) int64, in no column falling.
            place: (K, C, B) int64, below the client's number of rows.

        Returns:
            (K, C, B) int64.
        """
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
    own = counts[members]
    kept = own.new_empty(len(own), int(own.max()))
    return _Table(members, keys[members], own, torch.full_like(own, -1), kept)


def _looked_up(table: _Table, epoch: Tensor, place: Tensor) -> Tensor:
    orders = table.of(epoch[0], epoch[-1])
    client = torch.arange(len(table.members))[None, :, None]
    return orders[(epoch - epoch[0])[..., None], client, place]
