"""The one loop over rounds: draw a cohort, run its chunks, sum their updates, update the server."""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.process import CPU, moved, on
from hierfl.core.trees import Tree, nbytes, sizes, tree_leaves, tree_map
from hierfl.core.user_warnings import warn
from hierfl.data.batch import cut_ragged, full_batch
from hierfl.engine.aggregate import Sums, added, far_out, means_of, said_of_conflicts
from hierfl.engine.chunks import ClientError, Done, LeftOutClient, Task, over_batch, work_on
from hierfl.engine.client_store import Stored, Table, in_shared_memory, new_table, put, taken
from hierfl.engine.federation import Federation
from hierfl.engine.processes import RunAll, crew
from hierfl.method import Clock
from hierfl.program.handlers import unchecked

NAMED = 5  # clients in a message
CLIENT = attrgetter("client")
DELIVERED_AT_ONCE = 1024  # clients whose states are in memory together
TABLE_FILE = "local-table.bin"  # client states too large for memory, in the folder of a run


@dataclass(frozen=True, eq=False)
class Progress:
    """Where a run stands; rounds change `table` in place.

    Args:
        server: the server's state.
        table: the client states, one row for each client.
        history: one record a round.
        round: how many are done.
        compiled: whether steps are compiled, also when the run is resumed.
        chosen: the method that was chosen for a model, and why; None: it was named.
        verdict: whether a chosen method has converged, in words; None: not known.
        corrected: whether draws are corrected by importance weights.
        ended: what ended the run in place of rounds, and why; None: its rounds did.
        one_mode: whether climbs from many places on all rows, after the last round, reached one mode alone.
    """

    server: Tree
    table: Table
    history: tuple[dict[str, Any], ...] = ()
    round: int = 0
    compiled: bool = False
    chosen: str | None = None
    verdict: str | None = None
    corrected: bool = False
    ended: str | None = None
    one_mode: bool = False

    def advanced(
        self, server: Tree, table: Table, records: Sequence[dict[str, Any]], rounds: int = 1
    ) -> "Progress":
        """Return the progress after more rounds, which no verdict is of yet."""
        history = (*self.history, *records)
        where = replace(self, server=server, table=table, history=history, verdict=None)
        return replace(
            where, round=self.round + rounds, corrected=False, ended=None, one_mode=False
        )

    def __repr__(self) -> str:
        return f"Progress(round {self.round}, server {sizes(self.server)})"


def begin(
    federation: Federation, folder: Path | None = None, *, compiled: bool = False
) -> Progress:
    """Return the progress before the first round; large client states go to a file in `folder`."""
    path = None if folder is None else folder / TABLE_FILE
    table = new_table(federation.client.own, federation.data.num_clients, path)
    if federation.server.mail:
        _deliver(federation, federation.server.state, table)
    return Progress(federation.server.state, table, compiled=compiled)


def rounds(
    federation: Federation,
    progress: Progress,
    until: int,
    elsewhere: RunAll[Task, Done] | None = None,
) -> Generator[Progress, None, None]:
    """Run rounds until `until`, or the server has finished; yield the progress after each."""
    task = partial(work_on, federation, federation.client.phases)
    here: RunAll[Task, Done] | None = elsewhere
    if here is None and federation.cores < 2:
        here = partial(map, task)
    shared = here is None and not isinstance(progress.table, Stored)
    if shared:
        progress = replace(progress, table=tree_map(in_shared_memory, progress.table))
        task = partial(work_at, progress.table, task)
    with nullcontext(here) if here else crew(task, federation.cores) as run_all:
        while progress.round < until and not federation.server.finished(progress.server):
            progress = one_round(federation, progress, until, run_all, shared=shared)
            yield progress


def one_round(
    federation: Federation,
    progress: Progress,
    until: int,
    run_all: RunAll[Task, Done] | None = None,
    *,
    ids: Tensor | None = None,
    shared: bool = False,
) -> Progress:
    """Run one of `until` planned rounds, of a drawn cohort or of `ids`; if `shared`, `run_all` writes the table."""
    began = time.perf_counter()
    clock = Clock(progress.round, until, federation.cohort)
    data, server = federation.data, federation.server
    seed = federation.seed if server.cohort_seed is None else server.cohort_seed(clock)
    if ids is None:
        # clients are drawn in the order of their names: their order in the data does not matter
        chosen = noise.cohort(seed, clock.round, data.num_clients, federation.cohort)
        ids = data.by_name[chosen]
    message = server.down(progress.server, clock)
    run_all = run_all or partial(map, partial(work_on, federation, federation.client.phases))
    table = None if shared else progress.table
    cohort = _summed(_in_chunks(federation, run_all, message, table, ids, clock))
    if not len(cohort.ids):
        raise _all_left_out(federation, clock, cohort.left_out)
    record: dict[str, Any] = {"round": clock.round, "clients": len(cohort.ids)}
    means = means_of(cohort.total)
    for name, value in means.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            record[name] = float(value)
    left_out = tuple(sorted(map(CLIENT, cohort.left_out)))
    at = clock._replace(clients=len(cohort.ids), left_out=left_out)
    state = server.update(progress.server, means, at)
    mailed = _deliver(federation, state, progress.table) if server.mail else 0
    record |= {**server.logged(state), **_said(federation, cohort)}
    if surprise := server.surprise(state):
        record |= said_of_conflicts(surprise, data.names, data.counts)
    record["bytes_down"] = (nbytes(message) + mailed) * len(ids)
    record |= {"bytes_up": cohort.sent, "seconds": time.perf_counter() - began}
    return progress.advanced(state, progress.table, [record])


def _deliver(federation: Federation, server: Tree, table: Table) -> int:
    """Put the server's mail into the client states, and return the bytes that a client gets."""
    assert federation.server.mail is not None
    mail, count = federation.server.mail(server), federation.data.num_clients
    client = federation.client
    for ids in torch.arange(count).split(DELIVERED_AT_ONCE):
        own = taken(table, ids)
        theirs = tree_map(lambda _, v, ids=ids: v[ids], client.mail_in(own), mail)
        put(table, ids, client.with_mail(own, theirs))
    return nbytes(mail) // count


class Cohort(NamedTuple):
    """What the clients of a round gave: sums, positions and norms of those counted, the others."""

    total: Sums
    ids: Tensor
    norms: dict[str, Tensor]
    left_out: list[LeftOutClient]
    sent: int


def _summed(chunks: Iterable[Done]) -> Cohort:
    total: Sums = {}
    ids = [torch.zeros(0, dtype=torch.long)]
    norms: dict[str, list[Tensor]] = {}
    left_out: list[LeftOutClient] = []
    sent = 0
    for done in chunks:
        left_out += done.left_out
        sent += done.sent
        for name, up in done.sums.items():
            total[name] = added(total[name], up) if name in total else up
        for name, norm in done.norms.items():  # masked updates have none
            norms.setdefault(name, []).append(norm)
        if done.sums:
            ids.append(done.ids)
    joined = {name: torch.cat(parts) for name, parts in norms.items()}
    return Cohort(total, torch.cat(ids), joined, left_out, sent)


def _said(federation: Federation, cohort: Cohort) -> dict[str, Any]:
    names = federation.data.names
    said: dict[str, Any] = {}
    if federation.settings.on_client_error == "skip":
        said["left_out"] = [
            {"client": names[one.client], "reason": one.reason} for one in cohort.left_out
        ]
    if far := far_out(cohort.norms):
        said["far_out"] = [
            {"client": names[int(cohort.ids[one.pop("place")])], **one} for one in far
        ]
    return said


def _all_left_out(
    federation: Federation, clock: Clock, left_out: list[LeftOutClient]
) -> ClientError:
    names = federation.data.names
    some = "; ".join(f"'{names[out.client]}': {out.reason}" for out in left_out[:NAMED])
    others = f"; and {len(left_out) - NAMED} more" if len(left_out) > NAMED else ""
    return ClientError(
        f"round {clock.round}: all {len(left_out)} clients are left out ({some}{others}): lower the "
        "learning rate, or see what the model does with their rows"
    )


def adapt(federation: Federation, server: Tree, count: int, start: Table | None = None) -> Table:
    """Infer the states of new clients by `count` rounds from `start` (None: as new), globals fixed."""
    client, n = federation.client, federation.data.num_clients
    if client.most_adapting is not None:
        count = min(count, client.most_adapting)
    last = federation.server.last(server, Clock(0, max(count, 1)))
    table = new_table(client.own if client.new is None else client.new(last), n)
    if start is not None:
        for ids in torch.arange(n).split(DELIVERED_AT_ONCE):
            put(table, ids, taken(start, ids))
    phases = client.phases if client.adapt is None else client.adapt
    left_out: list[LeftOutClient] = []
    if tree_leaves(client.own) and phases:
        with crew(partial(work_on, federation, phases), federation.cores) as run_all:
            for clock in map(Clock, range(count), repeat(count)):
                message = federation.server.last(server, clock)
                for done in _in_chunks(federation, run_all, message, table, torch.arange(n), clock):
                    left_out += done.left_out  # their updates are for no server
    for position, times in Counter(map(CLIENT, left_out)).items():
        reason = next(one.reason for one in left_out if one.client == position)
        warn(
            f"new client '{federation.data.names[position]}' was left out of {times} of {count} "
            f"rounds, in which its state did not change: {reason}",
        )
    settle(federation, last, table)
    return table


def _in_chunks(
    federation: Federation,
    run_all: RunAll[Task, Done],
    message: Tree,
    table: Table | None,
    ids: Tensor,
    clock: Clock,
) -> Iterator[Done]:
    cuts = federation.parts(ids, message)
    slots = federation.slots_to_fill(cuts, message)
    tasks = (
        Task(message, None if table is None else taken(table, part), part, clock.round, slots)
        for part in cuts
    )
    for done in run_all(tasks):
        if table is not None:
            put(table, done.ids, done.own)
        yield done


def work_at(table: Table, work: Callable[[Task], Done], task: Task) -> Done:
    """Do a task on clients whose states are in a table that processes share; they do not travel."""
    done = work(task._replace(own=taken(table, task.ids)))
    put(table, done.ids, done.own)
    return done._replace(own=None)


CLIENTS_AT_ONCE = 64
ROWS_AT_ONCE = 1 << 12  # of clients carried at once, padded ones included


def settle(federation: Federation, last: Tree, table: Table) -> None:
    """Let every client find what predictions need of its rows, and put it into the table."""
    function = federation.client.settle
    if function is None:
        return
    data, without = federation.data, []
    at_once = max(1, min(CLIENTS_AT_ONCE, ROWS_AT_ONCE // max(1, int(data.counts.max()))))
    for ids in cut_ragged(torch.arange(data.num_clients).split(at_once), data.counts, most=at_once):
        with on(federation.device), unchecked(), torch.no_grad():
            message, own = moved((last, taken(table, ids)), federation.device)
            batch = full_batch(federation.rows, ids.to(federation.device), seed=federation.seed)
            settled = over_batch(partial(function, message), federation.at_once, own, batch)
            settled = moved(settled, CPU)
        put(table, ids, settled)
        bad = torch.zeros(len(ids), dtype=torch.bool)
        for leaf in tree_leaves(settled):
            if leaf.is_floating_point():
                bad |= leaf.isnan().reshape(len(ids), -1).any(1)
        without += [data.names[int(i)] for i in ids[bad]]
    if without:
        some = ", ".join(f"'{name}'" for name in without[:NAMED])
        warn(
            f"too few rows at {some}{', ...' if len(without) > NAMED else ''} for what predictions "
            f"need, so that theirs are NaN (clients: {len(without)}): leave such clients out, "
            "Settings(min_rows=2)",
        )


TAKES_PART = "takes_part"  # of a client that was left out: False where it failed before the rounds


def times_left_out(history: Iterable[Mapping[str, Any]]) -> int:
    """Return how many times a client that takes part was left out of a round."""
    return sum(map(len, left_out_of_rounds(history).values()))


def left_out_of_rounds(
    history: Iterable[Mapping[str, Any]],
) -> dict[str, list[tuple[int, Mapping[str, Any]]]]:
    """Return by client from which rounds a client that takes part was left out, and why."""
    of_client = records_of(history, "left_out").items()
    return {client: times for client, times in of_client if times[0][1].get(TAKES_PART, True)}


def absent_from(history: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the clients that took no part in a run, and why."""
    of_client = records_of(history, "left_out").items()
    return {
        client: str(times[0][1]["reason"])
        for client, times in of_client
        if not times[0][1].get(TAKES_PART, True)
    }


def with_absent(record: Mapping[str, Any], absent: Mapping[str, str]) -> dict[str, Any]:
    """Return the record of a round that names, beside those left out of it, who takes no part in the run."""
    others = [out for out in record.get("left_out", ()) if out.get(TAKES_PART, True)]
    absentees = [{"client": c, "reason": why, TAKES_PART: False} for c, why in absent.items()]
    return {**record, "left_out": [*others, *absentees]}


def records_of(
    history: Iterable[Mapping[str, Any]], column: str
) -> dict[str, list[tuple[int, Mapping[str, Any]]]]:
    """Return a column of the history ("left_out", "far_out") by client, with the rounds."""
    records: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for record in history:
        for entry in record.get(column) or ():
            records.setdefault(entry["client"], []).append((record["round"], entry))
    return records
