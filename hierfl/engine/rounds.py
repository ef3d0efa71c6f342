"""The one loop over rounds: draw a cohort, run its chunks, sum their updates, update the server.

It knows no method, no likelihood and no file format.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.trees import Tree, nbytes, tree_leaves
from hierfl.engine.aggregate import LogSum, added, means_of
from hierfl.engine.chunks import Done, Task, work_on
from hierfl.engine.client_store import Table, new_table, put, taken
from hierfl.engine.federation import Federation
from hierfl.engine.processes import RunAll, crew
from hierfl.method import Clock, Share

TABLE_FILE = "local-table.bin"  # client states too large for memory, in the folder of a run


@dataclass(frozen=True, eq=False)
class Progress:
    """Where a run stands.

    Args:
        server: the server's state.
        table: a row of client state for each client, in memory or in a file; rounds change it in place, as it
            may be larger than everything else.
        history: a record of each round.
        round: rounds done.
        compiled: the run's local steps are compiled; a resumed run then compiles too, and goes on bit for
            bit.
    """

    server: Tree
    table: Table
    history: tuple[dict[str, Any], ...] = ()
    round: int = 0
    compiled: bool = False


def begin(
    federation: Federation, folder: Path | None = None, *, compiled: bool = False
) -> Progress:
    """Return the progress of a run before its first round.

    Args:
        federation: that will run.
        folder: of the file that holds the client states if they are too large for memory; None: a temporary
            one.
        compiled: the run's local steps will be compiled.
    """
    path = None if folder is None else folder / TABLE_FILE
    table = new_table(federation.client.own, federation.data.num_clients, path)
    return Progress(federation.server.state, table, compiled=compiled)


def rounds(
    federation: Federation, progress: Progress, until: int
) -> Generator[Progress, None, None]:
    """Run rounds until `until` are done, or the server has finished, and yield the progress after each.

    Its worker processes end when the generator is closed: close it, unless it has run to its end.
    """
    task = partial(work_on, federation, federation.client.phases)
    with crew(task, federation.cores) as run_all:
        while progress.round < until and not federation.server.finished(progress.server):
            progress = one_round(federation, progress, until, run_all)
            yield progress


def one_round(
    federation: Federation,
    progress: Progress,
    until: int,
    run_all: RunAll[Task, Done] | None = None,
) -> Progress:
    """Run one round: draw a cohort, let it work, update the server.

    Args:
        federation: that runs.
        progress: before the round.
        until: rounds planned in all.
        run_all: runs the tasks of the chunks; None: this process, one after another.
    """
    began = time.perf_counter()
    clock = Clock(progress.round, until, federation.cohort)
    data, server = federation.data, federation.server
    # clients are drawn in the order of their names: their order in the data does not matter
    chosen = noise.cohort(federation.seed, clock.round, data.num_clients, federation.cohort)
    ids = data.by_name[chosen]
    message = server.down(progress.server, clock)
    run_all = run_all or partial(map, partial(work_on, federation, federation.client.phases))
    total: dict[str, Share | LogSum] = {}
    for sums in _in_chunks(federation, run_all, message, progress.table, ids, clock):
        total = {name: added(total[name], up) for name, up in sums.items()} if total else sums
    means = means_of(total)
    state = server.update(progress.server, means, clock)
    record = {
        "round": clock.round,
        "clients": len(ids),
        **_single_numbers(means),
        **server.logged(state),
        "bytes_down": nbytes(message) * len(ids),
        "bytes_up": nbytes(list(total.values())) * len(ids),
        "seconds": time.perf_counter() - began,
    }
    history = (*progress.history, record)
    return Progress(state, progress.table, history, clock.round + 1, progress.compiled)


def _single_numbers(means: dict[str, Tree]) -> dict[str, float]:
    """Return the means that are one number: they are logged."""
    return {
        name: float(mean)
        for name, mean in means.items()
        if isinstance(mean, Tensor) and mean.numel() == 1
    }


def adapt(federation: Federation, server: Tree, count: int) -> Table:
    """Infer the states of new clients by `count` rounds of their local steps, with the global params fixed.

    Args:
        federation: of the new clients alone.
        server: the server's last state.
        count: rounds; none are run where clients keep no state or have no phases to adapt by.

    Returns:
        A row of client state for each client.
    """
    client, n = federation.client, federation.data.num_clients
    table = new_table(client.own, n)
    phases = client.phases if client.adapt is None else client.adapt
    if not tree_leaves(client.own) or not phases:
        return table
    with crew(partial(work_on, federation, phases), federation.cores) as run_all:
        for r in range(count):
            clock = Clock(r, count)
            message = federation.server.last(server, clock)
            for _ in _in_chunks(federation, run_all, message, table, torch.arange(n), clock):
                pass  # their updates are for no server
    return table


def _in_chunks(
    federation: Federation,
    run_all: RunAll[Task, Done],
    message: Tree,
    table: Table,
    ids: Tensor,
    clock: Clock,
) -> Iterator[dict[str, Share | LogSum]]:
    """Run one round of some clients, put their states into the table, and yield the sums of each chunk."""
    parts = federation.parts(ids, message)
    slots = federation.slots_to_fill(parts, message)
    tasks = (Task(message, taken(table, part), part, clock.round, slots) for part in parts)
    for part, done in zip(parts, run_all(tasks), strict=True):
        put(table, part, done.own)
        yield done.sums
