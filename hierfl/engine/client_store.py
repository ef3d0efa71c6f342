"""What clients keep between rounds, a row each: in memory where that is small, in a file where it is not.

A row in the file is written to a place of its own that no checkpoint points to, so that a run that is killed finds the rows of
its last checkpoint as they were. Only clients that have taken part have a place: the file grows with them.
"""

from __future__ import annotations

import os
import tempfile
import weakref
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hierfl.core.trees import Tree, named_leaves, nbytes, tree_leaves, tree_map, with_leaves

IN_MEMORY = 1 << 30  # bytes of all rows, up to which they are kept in memory
NONE = -1


class DamagedRow(ValueError):
    """A row of the file is not what was written; the message names the file and the client's place in the federation."""


@dataclass(eq=False)
class Stored:
    """Rows in a file.

    Args:
        path: of the file.
        start: what a client keeps before its first round.
        places: (N,) int64, where in the file a client's row is, in rows; -1: the client has not begun.
        sums: (N,) int64, CRC-32 of each row.
        pinned: places that checkpoints point to: they are not written over.
        free: places that nobody points to.
        used: places in the file.
    """

    path: Path
    start: Tree
    places: Tensor
    sums: Tensor
    pinned: set[int] = field(default_factory=set)
    free: list[int] = field(default_factory=list)
    used: int = 0

    def __post_init__(self) -> None:
        """Open the file, and close it when nobody needs it any more."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, self.file)
        self.used = max(self.used, int(self.places.max()) + 1 if len(self.places) else 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return nbytes(self.start)

    def taken(self, ids: Tensor) -> Tree:
        """The rows of some clients, (C, ...) each leaf."""
        rows = np.empty((len(ids), self.row_bytes), np.uint8)
        begun = _packed(tree_map(lambda v: v[None], self.start))[0]
        for k, client in enumerate(ids.tolist()):
            place = int(self.places[client])
            rows[k] = begun if place == NONE else self._read(client, place)
        return _unpacked(rows, self.start)

    def _read(self, client: int, place: int) -> Any:
        found = os.pread(self.file, self.row_bytes, place * self.row_bytes)
        if len(found) != self.row_bytes or zlib.crc32(found) != int(self.sums[client]):
            raise DamagedRow(
                f"'{self.path}' is truncated or changed: the row of client number {client} is not what was written"
            )
        return np.frombuffer(found, np.uint8)

    def put(self, ids: Tensor, rows: Tree) -> None:
        """Write the rows of some clients."""
        rows = tree_map(lambda own, v: v.to(own.dtype), self.start, rows)
        for client, row in zip(ids.tolist(), _packed(rows), strict=True):
            place = int(self.places[client])
            if place == NONE or place in self.pinned:
                place = self.free.pop() if self.free else self.used
                self.used = max(self.used, place + 1)
            content = row.tobytes()
            os.pwrite(self.file, content, place * self.row_bytes)
            self.places[client], self.sums[client] = place, zlib.crc32(content)

    def index(self) -> Tree:
        """Where the rows are, as a checkpoint keeps it; the rows themselves are on disk by then."""
        os.fsync(self.file)
        return {"places": self.places, "sums": self.sums}

    def pin(self, indices: list[Tree]) -> None:
        """The checkpoints that there are now: what they point to stays, what nobody points to is written over."""
        self.pinned = {
            place for index in indices for place in index["places"].tolist() if place != NONE
        }
        taken = self.pinned | set(self.places.tolist())
        self.free = [place for place in range(self.used) if place not in taken]

    def at(self, path: Path, index: Tree) -> Stored:
        """The rows that an index of another file, or of another time, points to."""
        return Stored(path, self.start, index["places"].clone(), index["sums"].clone())

    def copied(self, path: Path) -> Stored:
        """The same rows in another file, those alone."""
        n = len(self.places)
        new = Stored(path, self.start, torch.full((n,), NONE), torch.zeros(n, dtype=torch.int64))
        new.used = -(
            -os.fstat(new.file).st_size // self.row_bytes
        )  # behind what is there: older checkpoints may point to it
        begun = (self.places != NONE).nonzero()[:, 0]
        for part in begun.split(64):
            new.put(part, self.taken(part))
        return new


Table = Any  # a tree of tensors with the clients in front, or `Stored`


def new_table(own: Tree, clients: int, path: Path | None = None) -> Table:
    """A row a client, none of which has begun.

    Args:
        own: what each keeps before its first round.
        clients: N.
        path: of the file, if one is needed; None: a temporary one.
    """
    if nbytes(own) * clients <= IN_MEMORY:
        return tree_map(lambda v: v.expand(clients, *v.shape).clone(), own)
    if path is None:
        folder = tempfile.TemporaryDirectory(prefix="hierfl-")
        table = new_stored(own, clients, Path(folder.name) / "rows.bin")
        weakref.finalize(table, folder.cleanup)
        return table
    return new_stored(own, clients, path)


def new_stored(own: Tree, clients: int, path: Path) -> Stored:
    """A file of rows, none of which has begun."""
    return Stored(path, own, torch.full((clients,), NONE), torch.zeros(clients, dtype=torch.int64))


def taken(table: Table, ids: Tensor) -> Tree:
    """The rows of some clients, (C, ...) each leaf: copies."""
    return table.taken(ids) if isinstance(table, Stored) else tree_map(lambda v: v[ids], table)


def put(table: Table, ids: Tensor, rows: Tree) -> None:
    """Put rows back in place: the table may be larger than all else, and is never copied."""
    if isinstance(table, Stored):
        table.put(ids, rows)
        return
    for leaf, row in zip(tree_leaves(table), tree_leaves(rows), strict=True):
        leaf[ids] = row


def subset(table: Table, ids: Tensor) -> Table:
    """The table of some clients, to be read."""
    if isinstance(table, Stored):
        return table.at(table.path, {"places": table.places[ids], "sums": table.sums[ids]})
    return taken(table, ids)


def _packed(rows: Tree) -> Any:
    """(C, row bytes) uint8."""
    leaves = [
        v.detach().contiguous().flatten(1) if v.dim() > 1 else v.detach()[:, None]
        for v in tree_leaves(rows)
    ]
    return np.concatenate(
        [leaf.numpy().view(np.uint8).reshape(len(leaf), -1) for leaf in leaves], 1
    )


def _unpacked(rows: Any, like: Tree) -> Tree:
    found, at = {}, 0
    for name, leaf in named_leaves(like).items():
        part = np.ascontiguousarray(rows[:, at : at + leaf.nbytes])
        found[name] = torch.from_numpy(part).view(leaf.dtype).reshape(len(rows), *leaf.shape)
        at += leaf.nbytes
    return with_leaves(like, found)
