"""The decision whether a run is long enough to repay compiling its local steps."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import islice

import pyro
import torch
from torch import Tensor

from hierfl.core.device import moved, on
from hierfl.core.trees import Tree, tree_map
from hierfl.engine.chunks import FAILURES, local_step
from hierfl.engine.federation import Federation
from hierfl.engine.minibatches import steps
from hierfl.engine.over_clients import over_clients
from hierfl.method import Clock, Phase

COMPILING_SECONDS = 20.0  # to compile a method's steps on a slow machine


def worth_compiling(federation: Federation, rounds: int) -> bool:
    """Return whether a run would spend more time in eager local steps than compiling them takes.

    One eager step of each phase is measured, and its result thrown away. A step that fails is not compiled.

    Args:
        federation: not compiled.
        rounds: of the run.
    """
    if not federation.at_once:
        return False
    server, device = federation.server, federation.device
    ids = federation.cut([torch.arange(min(federation.slots, federation.cohort))])[0]
    count = len(ids)
    chunks = rounds * -(-federation.cohort // federation.slots)
    message = moved(server.down(server.state, Clock(0, rounds)), device)
    own = tree_map(lambda v: v.expand(count, *v.shape), federation.client.own)
    with on(device), pyro.validation_enabled(False):
        start = over_clients(lambda own: federation.client.start(message, own), at_once=True)
        try:
            work = start(moved(own, device), count=count)
            seconds = sum(
                _seconds(federation, phase, work, message, ids.to(device))
                for phase in federation.client.phases
            )
        except FAILURES:  # of a client's rows: the first round names the client
            return False
    return seconds * chunks > COMPILING_SECONDS


def _seconds(federation: Federation, phase: Phase, work: Tree, message: Tree, ids: Tensor) -> float:
    """Return the seconds that all local steps of a phase take on one chunk."""
    step, seconds = local_step(phase, at_once=True), 0.0
    short = replace(phase, count=min(phase.count, 2))
    for tensors, _ in islice(steps(federation.rows, ids, short, seed=0, at=(0, 0)), 2):
        began = time.perf_counter()
        step(work, message, tensors, ())
        seconds = time.perf_counter() - began  # of the last: the first step is slower
    passes = 1
    if phase.unit == "epoch" and phase.batch_size:
        passes = int(federation.data.counts.max()) // phase.batch_size + 1
    return seconds * phase.count * passes
