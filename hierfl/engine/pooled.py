"""Rounds as steps of one pooled Pyro program with all clients' rows: the reference for the other engines."""

from __future__ import annotations

import time
from collections.abc import Generator

import torch

from hierfl.core.device import CPU, moved, on
from hierfl.data.batch import full_batch
from hierfl.data.ragged import check_padded
from hierfl.engine.client_store import taken
from hierfl.engine.federation import Federation
from hierfl.engine.rounds import Progress
from hierfl.method import Clock, Method
from hierfl.program.handlers import unchecked


def pooled_rounds(
    method: Method, federation: Federation, progress: Progress, until: int
) -> Generator[Progress, None, None]:
    """Run rounds of a method, each as one step of the pooled program, and yield the progress after each.

    Args:
        method: that has a pooled form.
        federation: its clients and its checked program.
        progress: where the run stands.
        until: rounds planned in all.

    Raises:
        ValueError: the method has no pooled form, or the guide draws one client at a time.
    """
    if method.pooled is None:
        raise ValueError(
            f"method '{method.name}' has no pooled form: use engine='vectorized' or 'sequential'"
        )
    if not federation.program.keyed:
        raise ValueError(
            "engine='pooled' draws for all clients at once, which the guide's own sampler cannot: use "
            "engine='sequential', or a guide of Normals (hierfl.diagnostics.nuts samples the model itself)"
        )
    check_padded(federation.data)
    move = method.pooled(federation.program)
    everyone = torch.arange(federation.data.num_clients)
    device = federation.device
    while progress.round < until:
        began = time.perf_counter()
        clock = Clock(progress.round, until)
        with on(device), unchecked():
            batch = full_batch(
                federation.rows,
                everyone.to(device),
                seed=federation.seed,
                at=(clock.round, JOINT_PHASE, 0),
            )
            where = moved((progress.server, taken(progress.table, everyone)), device)
            server, table, logged = move(where[0], where[1], batch, clock)
        server, table = moved((server, table), CPU)
        record = {
            "round": clock.round,
            "clients": len(everyone),
            **logged,
            "bytes_down": 0,
            "bytes_up": 0,
        }
        record["seconds"] = time.perf_counter() - began
        progress = Progress(
            server, table, (*progress.history, record), clock.round + 1, progress.compiled
        )
        yield progress


JOINT_PHASE = 1  # the number of fedsvi's phase of joint steps, whose noise the pooled step shares
