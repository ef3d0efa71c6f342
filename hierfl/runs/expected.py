"""What a run is going to do, and about how long it will take, told before its first round."""

from __future__ import annotations

import time

import torch

from hierfl.data.clients import ClientData
from hierfl.engine.chunks import Task, work_on
from hierfl.engine.client_store import taken
from hierfl.engine.federation import Federation
from hierfl.engine.rounds import Progress
from hierfl.method import Clock, Method

FEW = 12  # clients whose work is timed
LONG = 4.0  # seconds of one client that are long enough to be timed once
# What a self-stopping method takes beside its first round of clients' work: later rounds are longer,
# and the server draws, the longer the more clients and global numbers. By the ten problems of
# benchmarks.seconds; answers lie between half and twice as long.
LATER, SERVER, MANY_NUMBERS, MANY_CLIENTS, MOST_CLIENTS = 2.0, 1.0, 20, 300, 1000


def expected(method: Method, data: ClientData, rounds: int | None, usual: int | None = None) -> str:
    """Return what a run is going to do, in words; `usual` rounds are those that it mostly takes."""
    what = f"{data.num_clients:,} clients, {data.num_rows:,} rows: "
    if rounds is not None:
        return f"{what}{_rounds(rounds)}" + (" at most" if method.most_rounds else "")
    if 1 in (method.most_rounds, usual):
        return f"{what}one round"
    about = f"about {usual} rounds" if usual else "rounds until it is done"
    return f"{what}{about}, {method.most_rounds} at most"


def seconds_expected(federation: Federation, where: Progress, rounds: int) -> float:
    """Return about how long so many rounds take, by the work of a few clients, timed."""
    data, cohort = federation.data, federation.cohort
    message = federation.server.down(where.server, Clock(where.round, rounds, cohort))
    sample = min(FEW, cohort)

    def timed(count: int) -> float:
        places = torch.linspace(0, data.num_clients - 1, count).long()
        ids, began = data.by_name[places], time.perf_counter()
        task = Task(message, taken(where.table, ids), ids, where.round, 0)
        work_on(federation, federation.client.phases, task)
        return time.perf_counter() - began

    first = timed(1)  # which reads the program, too
    if first < LONG:
        first, several = timed(1), timed(sample)
    else:  # a round would not take much longer, and should not be run twice to say so
        several = first
    per_client = max(0.0, several - first) / max(1, sample - 1)
    clients = (first + per_client * (cohort - 1)) / federation.cores
    if not federation.server.stops_itself:
        return rounds * clients
    numbers = federation.program.latents.global_block.size / MANY_NUMBERS
    server = SERVER + numbers**2 + min(data.num_clients, MOST_CLIENTS) / MANY_CLIENTS
    return server + clients * (1 if rounds == 1 else LATER * rounds)


def in_words(seconds: float) -> str:
    """Return a duration, rounded."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    minutes = seconds / 60
    return f"about {minutes:.0f} minutes" if minutes < 90 else f"about {minutes / 60:.1f} hours"


def _rounds(count: int) -> str:
    return f"{count} round{'s' * (count > 1)}"
