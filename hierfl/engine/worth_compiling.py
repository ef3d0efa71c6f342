"""The decision whether a run is long enough to repay compiling its local steps."""

import time
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from hierfl.core.process import moved, on
from hierfl.core.traced import WorkCounter
from hierfl.core.trees import Tree, tree_map
from hierfl.engine.chunks import FAILURES, local_step, over_clients
from hierfl.engine.federation import Federation
from hierfl.engine.minibatches import steps
from hierfl.method import Clock, Phase
from hierfl.program.handlers import unchecked

COMPILING_SECONDS = 20.0  # to compile a method's steps on a slow machine
# To trace and lower one operation of an eager step; 5 to 9 ms were measured. A step of nested
# derivatives has thousands (bfi: 15,000), that of fedavg on a small network 139.
OPERATION_SECONDS = 0.005
# Rounds of a self-stopping method: FedLaplace took 5 to 9 of those allowed (benchmarks/ROUNDS.md).
LIKELY_ROUNDS = 12


def worth_compiling(federation: Federation, rounds: int, most: int | None = None) -> bool:
    """Return whether eager local steps, of which one each is measured, take longer than compiling them."""
    if most is not None:
        rounds = min(rounds, most, LIKELY_ROUNDS)
    server, device = federation.server, federation.device
    ids = federation.cut([torch.arange(min(federation.slots, federation.cohort))])[0]
    count = len(ids)
    chunks = rounds * -(-federation.cohort // federation.slots)
    message = moved(server.down(server.state, Clock(0, rounds)), device)
    own = tree_map(lambda v: v.expand(count, *v.shape), federation.client.own)
    with on(device), unchecked():
        start = partial(federation.client.start, message)
        try:
            work = over_clients(start, True, moved(own, device), count=count)
            phases, at = federation.client.phases, (work, message, ids.to(device))
            eager = chunks * sum(_seconds(federation, phase, *at) for phase in phases)
            if eager <= COMPILING_SECONDS:
                return False
            operations = sum(_operations(federation, phase, *at) for phase in phases)
        except FAILURES:  # of a client's rows: the first round names the client
            return False
    return eager > operations * OPERATION_SECONDS


def _operations(
    federation: Federation, phase: Phase, work: Tree, message: Tree, ids: Tensor
) -> int:
    step, phase_of_one = local_step(phase, at_once=True), replace(phase, count=min(phase.count, 1))
    with WorkCounter() as counter:
        for tensors, _ in islice(steps(federation.rows, ids, phase_of_one, seed=0, at=(0, 0)), 1):
            counter.operations = 0  # what fetched the rows is no part of the step
            step(work, message, tensors, ())
    return counter.operations


def _seconds(federation: Federation, phase: Phase, work: Tree, message: Tree, ids: Tensor) -> float:
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
