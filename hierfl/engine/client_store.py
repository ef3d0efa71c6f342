"""Client state: in memory, or in a file whose rows are not overwritten while a checkpoint needs them."""

import mmap
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

from hierfl.core.disk import PRIVATE_FILE, write_all, writing
from hierfl.core.trees import Tree, named_leaves, nbytes, tree_leaves, tree_map, with_leaves

IN_MEMORY = 1 << 30  # bytes; rows that take more in all are kept in a file
NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # not on Windows
NONE = -1  # the place of a client that has not taken part yet


class CheckpointError(ValueError):
    """A checkpoint that is damaged, not of hierfl, or of another run; the message says which."""


class DamagedRow(CheckpointError):
    """A row of the file is not what was written; the message names file and client."""


@dataclass(eq=False)
class Stored:
    """Client state in a file: places and CRC-32 (N,), -1 if none; `pinned` ones are in checkpoints."""

    path: Path
    start: Tree
    places: Tensor
    sums: Tensor
    pinned: set[int] = field(default_factory=set)
    free: list[int] = field(default_factory=list)
    used: int = 0

    def __post_init__(self) -> None:
        """Open the file; it is closed with the last reference to this object."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # a link in a folder from elsewhere would let rows be written over any of the user's files
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | NO_LINK, PRIVATE_FILE)
        weakref.finalize(self, os.close, self.file)
        self.used = max(self.used, int(self.places.max()) + 1 if len(self.places) else 0)

    def __repr__(self) -> str:
        seen = int((self.places >= 0).sum())
        return f"Stored({str(self.path)!r}, {seen} of {len(self.places)} clients)"

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes."""
        return nbytes(self.start)

    def taken(self, ids: Tensor) -> Tree:
        """Return the rows of clients at positions `ids` (C,): (C, ...) each leaf."""
        rows = np.empty((len(ids), self.row_bytes), np.uint8)
        begun = _packed(tree_map(lambda v: v[None], self.start))[0]
        for k, client in enumerate(ids.tolist()):
            place = int(self.places[client])
            rows[k] = begun if place == NONE else self._read(client, place)
        return _unpacked(rows, self.start)

    def _read(self, client: int, place: int) -> Any:
        row = os.pread(self.file, self.row_bytes, place * self.row_bytes)
        if len(row) != self.row_bytes or zlib.crc32(row) != int(self.sums[client]):
            raise DamagedRow(
                f"'{self.path}' is truncated or changed: the row of client number {client} is not "
                "what was written"
            )
        return np.frombuffer(row, np.uint8)

    def put(self, ids: Tensor, rows: Tree) -> None:
        """Write the rows of clients at positions `ids` (C,), (C, ...) each leaf, in place."""
        rows = tree_map(lambda own, v: v.to(own.dtype), self.start, rows)
        for client, row in zip(ids.tolist(), _packed(rows), strict=True):
            place = int(self.places[client])
            if place == NONE or place in self.pinned:
                place = self.free.pop() if self.free else self.used
                self.used = max(self.used, place + 1)
            content = row.tobytes()
            write_all(self.file, content, place * self.row_bytes, self.path)
            self.places[client], self.sums[client] = place, zlib.crc32(content)

    def index(self) -> Tree:
        """Return places and sums of all rows, for a checkpoint, once the rows are on disk."""
        with writing(self.path, 0):
            os.fsync(self.file)
        return {"places": self.places, "sums": self.sums}

    def pin(self, indices: list[Tree]) -> None:
        """Protect the places that checkpoints on disk point to, and free all others."""
        self.pinned = {
            place for index in indices for place in index["places"].tolist() if place != NONE
        }
        taken = self.pinned | set(self.places.tolist())
        self.free = [place for place in range(self.used) if place not in taken]

    def at(self, path: Path, index: Tree) -> "Stored":
        """Return the rows that an index points to, of another file or of an earlier time."""
        return Stored(path, self.start, index["places"].clone(), index["sums"].clone())

    def copied(self, path: Path) -> "Stored":
        """Copy the rows that clients point to, and no others, to another file."""
        n = len(self.places)
        new = Stored(path, self.start, torch.full((n,), NONE), torch.zeros(n, dtype=torch.int64))
        # write behind what is there: older checkpoints may point to it
        new.used = -(-os.fstat(new.file).st_size // self.row_bytes)
        begun = (self.places != NONE).nonzero()[:, 0]
        for part in begun.split(64):
            new.put(part, self.taken(part))
        return new


Table = Any  # a tree of tensors with the clients in front, or `Stored`


def new_table(own: Tree, clients: int, path: Path | None = None) -> Table:
    """Return the first state of each client, (N, ...); above `IN_MEMORY` bytes, in a file."""
    if nbytes(own) * clients <= IN_MEMORY:
        return tree_map(lambda v: v.expand(clients, *v.shape).clone(), own)
    if path is None:
        folder = tempfile.TemporaryDirectory(prefix="hierfl-")
        table = new_stored(own, clients, Path(folder.name) / "rows.bin")
        weakref.finalize(table, folder.cleanup)
        return table
    return new_stored(own, clients, path)


def in_shared_memory(leaf: Tensor) -> Tensor:
    """Copy a leaf of a table to memory that this process shares with the copies of it made later."""
    if not leaf.numel():
        return leaf
    # no file in /dev/shm, which is small in containers
    pages = mmap.mmap(-1, leaf.nbytes)
    return torch.frombuffer(pages, dtype=leaf.dtype).view(leaf.shape).copy_(leaf)


def new_stored(own: Tree, clients: int, path: Path) -> Stored:
    """Return rows in a file, of clients that have not taken part yet."""
    return Stored(path, own, torch.full((clients,), NONE), torch.zeros(clients, dtype=torch.int64))


def taken(table: Table, ids: Tensor) -> Tree:
    """Return the rows of clients at positions `ids` (C,): (C, ...) each leaf."""
    return table.taken(ids) if isinstance(table, Stored) else tree_map(lambda v: v[ids], table)


def put(table: Table, ids: Tensor, rows: Tree) -> None:
    """Write the rows of clients at positions `ids` (C,), (C, ...) each leaf, in place."""
    if isinstance(table, Stored):
        table.put(ids, rows)
        return
    for leaf, row in zip(tree_leaves(table), tree_leaves(rows), strict=True):
        leaf[ids] = row


def subset(table: Table, ids: Tensor) -> Table:
    """Return the table of some clients, to be read from only."""
    if isinstance(table, Stored):
        return table.at(table.path, {"places": table.places[ids], "sums": table.sums[ids]})
    return taken(table, ids)


def _packed(rows: Tree) -> Any:
    leaves = [
        v.detach().contiguous().flatten(1) if v.dim() > 1 else v.detach()[:, None]
        for v in tree_leaves(rows)
    ]
    return np.concatenate(
        [leaf.numpy().view(np.uint8).reshape(len(leaf), -1) for leaf in leaves], 1
    )


def _unpacked(rows: Any, like: Tree) -> Tree:
    """Return the rows, (C, ...) each leaf, of their bytes; the inverse of `_packed`."""
    tensors, at = {}, 0
    for name, leaf in named_leaves(like).items():
        part = np.ascontiguousarray(rows[:, at : at + leaf.nbytes])
        tensors[name] = torch.from_numpy(part).view(leaf.dtype).reshape(len(rows), *leaf.shape)
        at += leaf.nbytes
    return with_leaves(like, tensors)
