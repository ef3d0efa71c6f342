"""The one loop over rounds: cohort -> chunks -> local steps -> finish -> sum -> server.

It knows no method, no likelihood and no file format. A chunk of clients is carried at once under `torch.vmap`, or one client
after another; either way a client's functions see one client.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.device import CPU, moved, on
from hierfl.core.trees import Tree, named_leaves, nbytes, scaled, tree_leaves, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.engine.aggregate import LogSum, added, means_of, summed
from hierfl.engine.client_store import Table, new_table, put, taken
from hierfl.engine.compiled import Loop
from hierfl.engine.federation import Federation
from hierfl.engine.minibatches import batch_of, batches, steps
from hierfl.engine.over_clients import over_batch, over_clients, where_working
from hierfl.engine.processes import Work, crew
from hierfl.method import Clock, LogShare, Phase, Share, Up

COMPILING_SECONDS = 20.0  # what compiling a method's steps may take on a slow machine
ROWS = (
    "local-table.bin"  # what clients keep, in the folder of a run, where it is too much for memory
)


class ClientError(RuntimeError):
    """A client fails, or what it sends is not finite; the message names the client and the round."""


@dataclass(frozen=True, eq=False)
class Progress:
    """Where a run stands.

    Args:
        server: the server's state.
        table: a row of own state a client, in memory or in a file, changed in place: it may be larger than all else.
        history: what happened in each round.
        round: rounds done.
        compiled: whether the run's steps are compiled, so that a resumed run goes on bit for bit.
    """

    server: Tree
    table: Table
    history: tuple[dict[str, Any], ...] = ()
    round: int = 0
    compiled: bool = False


def begin(federation: Federation, folder: Path | None = None) -> Progress:
    """Before the first round; what clients keep is in a file of that folder, if it is too much for memory."""
    path = None if folder is None else folder / ROWS
    return Progress(
        federation.server.state, new_table(federation.client.own, federation.data.num_clients, path)
    )


def rounds(federation: Federation, progress: Progress, until: int) -> Iterator[Progress]:
    """Run rounds, yielding where the run stands after each."""
    with crew(partial(_chunk, federation, federation.client.phases), federation.cores) as work:
        while progress.round < until and not federation.server.finished(progress.server):
            progress = one_round(federation, progress, until, work)
            yield progress


def one_round(
    federation: Federation, progress: Progress, until: int, work: Work[Task, Done] | None = None
) -> Progress:
    """One round: sample a cohort, let it work, update the server; the work is done here if nobody is there to do it."""
    began = time.perf_counter()
    clock = Clock(progress.round, until, federation.cohort)
    data, client, server = federation.data, federation.client, federation.server
    # a cohort is drawn among clients in the order of their names, so that it does not depend on the order of the data
    chosen = noise.cohort(federation.seed, clock.round, data.num_clients, federation.cohort)
    ids = data.by_name[chosen]
    message = server.down(progress.server, clock)
    total: dict[str, Share | LogSum] = {}
    work = work or partial(map, partial(_chunk, federation, client.phases))
    for found in _in_chunks(federation, work, message, progress.table, ids, clock):
        total = {name: added(total[name], up) for name, up in found.items()} if total else found
    means = means_of(total)
    state = server.update(progress.server, means, clock)
    record = {
        "round": clock.round,
        "clients": len(ids),
        **{
            name: float(mean)
            for name, mean in means.items()
            if isinstance(mean, Tensor) and mean.numel() == 1
        },
        **server.logged(state),
        "bytes_down": nbytes(message) * len(ids),
        "bytes_up": nbytes(list(total.values())) * len(ids),
        "seconds": time.perf_counter() - began,
    }
    return Progress(
        state, progress.table, (*progress.history, record), clock.round + 1, progress.compiled
    )


def adapt(federation: Federation, server: Tree, count: int) -> Table:
    """Own states of clients never seen, after `count` rounds of their own steps with the global params fixed: a table."""
    client, n = federation.client, federation.data.num_clients
    table = new_table(client.own, n)
    phases = client.phases if client.adapt is None else client.adapt
    if not tree_leaves(client.own) or not phases:
        return table
    with crew(partial(_chunk, federation, phases), federation.cores) as work:
        for r in range(count):
            clock = Clock(r, count)
            message = federation.server.last(server, clock)
            for _ in _in_chunks(federation, work, message, table, torch.arange(n), clock):
                pass  # what they would send is of a round that no server asked for
    return table


Task = tuple[
    Tree, Tree, Tensor, int, int
]  # what clients are told, what they keep, which they are, the round, lanes
Done = tuple[dict[str, Share | LogSum], Tree]  # the sum of what they send, what they keep


def _in_chunks(
    federation: Federation,
    work: Work[Task, Done],
    message: Tree,
    table: Table,
    ids: Tensor,
    clock: Clock,
) -> Iterator[dict[str, Share | LogSum]]:
    """One round of some clients: what they keep is put into the table, what each chunk sends is handed on."""
    parts = federation.parts(ids, message)
    width = federation.width(parts, message)
    tasks = ((message, taken(table, part), part, clock.round, width) for part in parts)
    for part, (found, mine) in zip(parts, work(tasks), strict=True):
        put(table, part, mine)
        yield found


def _chunk(federation: Federation, phases: tuple[Phase, ...], task: Task) -> Done:
    """One round of a chunk of clients, wherever it is worked on."""
    with on(federation.device):
        message, mine, part, round_, width = moved(task, federation.device)
        everyone, kept = part, mine
        if len(part) < width:
            lane = torch.arange(width).clamp(max=len(part) - 1)
            everyone, kept = part[lane], tree_map(lambda v: v[lane], mine)
        try:
            done = client_round(federation, phases, message, kept, everyone, round_)
        except (RuntimeError, ValueError) as error:  # torch's linear algebra, say
            raise _blamed(federation, message, mine, part, round_, error) from error
        ups, mine = tree_map(lambda v: v[: len(part)], done)
        found = {name: summed(up) for name, up in ups.items()}
        _check_finite(found, ups, federation.data, part, round_)
    answer: Done = moved((found, mine), CPU)
    return answer


def client_round(
    federation: Federation,
    phases: tuple[Phase, ...],
    message: Tree,
    own: Tree,
    ids: Tensor,
    round_: int,
) -> tuple[dict[str, Any], Tree]:
    """One round of some clients: (what each sends, weighted, with the clients in front; what each keeps)."""
    client, at_once = federation.client, federation.at_once
    with pyro.validation_enabled(False):
        lane = over_clients(lambda own: client.start(message, own), at_once)(own, count=len(ids))
    for p, phase in enumerate(phases):
        lane = _worked(federation, (round_, p), phase, lane, message, ids)

    def finish(lane: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        up, own = client.finish(lane, message, own, rows)
        return {name: _weighted(share) for name, share in up.items()}, own

    rows = federation.rows.counts[ids].to(torch.get_default_dtype())
    with pyro.validation_enabled(False):
        answer: tuple[dict[str, Any], Tree] = over_clients(finish, at_once)(
            lane, own, rows, count=len(ids)
        )
    return answer


def _worked(
    federation: Federation,
    at: tuple[int, int],
    phase: Phase,
    lane: Tree,
    message: Tree,
    ids: Tensor,
) -> Tree:
    """The lanes of some clients after a phase, which with the round says `at` what time it is."""
    data, seed = federation.rows, federation.seed
    if federation.graphs is None or not federation.at_once:
        with pyro.validation_enabled(False):
            for batch, active in batches(data, ids, phase, seed=seed, at=at):
                lane = _step(federation, phase, lane, message, batch, active)
        return lane
    loop = Loop(federation.graphs, (at[1], phase.step), _compilable(phase), lane, message)
    for parts, active in steps(data, ids, phase, seed=seed, at=at):
        loop.step(parts, () if active is None else (active,))
    return loop.value()


def _weighted(share: Share | LogShare) -> Share | LogShare:
    """What a client hands over: a value times its weight, or with its log weight."""
    if isinstance(share, LogShare):
        return LogShare(
            share.value, torch.as_tensor(share.log_weight, dtype=torch.get_default_dtype())
        )
    weight = torch.as_tensor(share.weight, dtype=torch.get_default_dtype())
    return Share(scaled(share.value, weight), weight)


def worth_compiling(federation: Federation, rounds: int) -> bool:
    """Whether a run is long enough to repay compiling its steps: one eager step is measured, and thrown away."""
    if not federation.at_once:
        return False
    ids = torch.arange(min(federation.slots, federation.cohort))
    calls = rounds * -(-federation.cohort // federation.slots)
    message = moved(
        federation.server.down(federation.server.state, Clock(0, rounds)), federation.device
    )
    own = moved(
        tree_map(lambda v: v.expand(len(ids), *v.shape), federation.client.own), federation.device
    )
    seconds = 0.0
    with on(federation.device), pyro.validation_enabled(False):
        lane = over_clients(lambda own: federation.client.start(message, own), at_once=True)(
            own, count=len(ids)
        )
        for phase in federation.client.phases:
            two = replace(phase, count=min(phase.count, 2))
            first = list(
                itertools.islice(
                    batches(federation.rows, ids.to(federation.device), two, seed=0, at=(0, 0)), 2
                )
            )
            for batch, _ in first:  # the first is slower than those after it
                began = time.perf_counter()
                _step(federation, phase, lane, message, batch, None)
                last = time.perf_counter() - began
            passes = (
                1
                if phase.unit == "step" or not phase.batch_size
                else int(federation.data.counts.max()) // phase.batch_size + 1
            )
            seconds += last * phase.count * passes * calls if first else 0.0
    return seconds > COMPILING_SECONDS


def _step(
    federation: Federation,
    phase: Phase,
    lane: Tree,
    message: Tree,
    batch: ClientBatch,
    active: Tensor | None,
) -> Tree:
    """One local step of some clients, not compiled."""
    moved = over_batch(lambda lane, b: phase.step(lane, message, b), federation.at_once)(
        lane, batch
    )
    return moved if active is None else where_working(active, moved, lane)


def _compilable(phase: Phase) -> Callable[..., Tree]:
    """The same as a function of trees of tensors."""

    def step(lane: Tree, message: Tree, parts: Tree, active: tuple[Tensor, ...]) -> Tree:
        with pyro.validation_enabled(False):
            moved = over_batch(lambda lane, b: phase.step(lane, message, b), at_once=True)(
                lane, batch_of(parts, phase)
            )
        return where_working(active[0], moved, lane) if active else moved

    return step


def _blamed(
    federation: Federation, message: Tree, own: Tree, ids: Tensor, round_: int, error: Exception
) -> ClientError:
    """The error of a chunk with the name of the client it is of: clients are run again one by one, until one fails."""
    alone = replace(federation, engine="sequential", graphs=None)
    for i in range(len(ids)):
        try:
            client_round(
                alone,
                federation.client.phases,
                message,
                tree_map(lambda v, i=i: v[i : i + 1], own),
                ids[i : i + 1],
                round_,
            )
        except (RuntimeError, ValueError) as own_error:
            return ClientError(
                f"round {round_}: client '{federation.data.names[int(ids[i])]}' fails: {own_error}"
            )
    return ClientError(
        f"round {round_}: a step of {len(ids)} clients fails, though not of any alone: {error}"
    )


def _check_finite(
    summed: dict[str, Share | LogSum], ups: Up, data: ClientData, ids: Tensor, round_: int
) -> None:
    if all(
        bool(leaf.sum().isfinite()) for leaf in tree_leaves(summed)
    ):  # a sum is finite only if all it is of is
        return
    for path, leaf in named_leaves(ups).items():
        bad = ~leaf.isfinite().flatten(1).all(1) if leaf.dim() > 1 else ~leaf.isfinite()
        if bool(bad.any()):
            name = data.names[int(ids[bad.nonzero()[0, 0]])]
            raise ClientError(
                f"round {round_}: what client '{name}' sends is not finite ({path}; {int(bad.sum())} of {len(ids)} clients): "
                f"lower the learning rate, or tighten the prior that lets its weights run away"
            )
