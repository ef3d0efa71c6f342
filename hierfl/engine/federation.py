"""What stays the same from round to round: a program, what clients and server do, the rows, and who is worked on together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from hierfl.core.device import CPU
from hierfl.core.trees import Tree
from hierfl.data.clients import ClientData
from hierfl.engine.compiled import Graphs
from hierfl.method import Client, Server
from hierfl.program.program import Program

Engine = Literal["vectorised", "sequential"]
FEWEST = 4  # clients of a small network worth a core: with fewer, starting each operation takes as long as doing it
CHUNK_BYTES = 13 << 20  # what a chunk of clients may take: more is no faster, as it leaves the caches
ACCELERATOR_BYTES = 1 << 30  # the same on an accelerator, whose many cores want all the clients that there are


@dataclass(frozen=True, eq=False)
class Federation:
    """What stays the same from round to round.

    Args:
        program: the checked program.
        client: what a client does.
        server: what the server does.
        data: the clients' rows.
        seed: of everything random.
        cohort: clients a round, 1..N.
        engine: "vectorised" or "sequential".
        chunk: clients carried at once; None: as many as fit `CHUNK_BYTES`.
        graphs: compiled steps; None: all runs eagerly.
        device: where chunks are worked on.
    """

    program: Program
    client: Client
    server: Server
    data: ClientData
    seed: int = 0
    cohort: int = 1
    engine: Engine = "vectorised"
    chunk: int | None = None
    graphs: Graphs | None = None
    device: torch.device = CPU

    @cached_property
    def rows(self) -> ClientData:
        """The clients' rows where they are worked on."""
        return self.data.to(self.device)

    @property
    def at_once(self) -> bool:
        """Whether clients are carried under `torch.vmap`, be it one alone, and steps may be compiled."""
        return self.engine == "vectorised" and self.program.keyed

    @property
    def lanes(self) -> int:
        """Clients carried at once."""
        if not self.at_once:
            return 1
        if self.chunk is not None:
            return self.chunk
        row = sum(v[:1].nbytes for v in self.data.fields.values())
        rows = max([p.batch_size or int(self.data.counts.max()) for p in self.client.phases if p.count], default=1)
        state = sum(spec.start.nbytes for spec in self.program.params)
        one = row * rows + state + 1
        if self.device.type != "cpu":
            return max(1, ACCELERATOR_BYTES // one)
        # starting a step one operation after another takes so long that it must be worth it
        return max(1 if self.graphs else 8, min(4096, CHUNK_BYTES // one))

    @property
    def cores(self) -> int:
        """Chunks of clients worked on at once, each by a process on a core of its own, where steps are compiled."""
        if self.graphs is None or not self.at_once or self.device.type != "cpu":
            return 1
        return max(1, min(torch.get_num_threads(), self.cohort // min(FEWEST, self.lanes)))

    def parts(self, ids: Tensor, message: Tree) -> tuple[Tensor, ...]:
        """Clients in chunks, as nearly of one size as can be.

        Where they ask for it, those with like numbers of rows (within a factor of 4) are carried together instead.
        """
        if self.at_once and self.client.like_rows(message):
            kind = (self.data.counts[ids].clamp(min=1).log2() / 2.0).ceil()
            return tuple(part for k in kind.unique() for part in ids[kind == k].split(self.lanes))
        cores = min(self.cores, len(ids))
        fewest = -(-len(ids) // (self.lanes * cores)) * cores  # as many for each core
        even = (n for n in range(fewest, 2 * fewest, cores) if len(ids) % n == 0)
        return ids.split(-(-len(ids) // next(even, fewest)))

    def width(self, parts: Sequence[Tensor], message: Tree) -> int:
        """Lanes that every chunk fills where steps are compiled: a smaller one repeats its last client, whose second answer is dropped.

        So one shape is compiled, not two. Chunks of like rows differ in shape anyhow, and are left as they are: 0.
        """
        return 0 if self.graphs is None or not self.at_once or self.client.like_rows(message) else max(map(len, parts))
