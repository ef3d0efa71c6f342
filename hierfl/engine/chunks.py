"""One round of one chunk of clients: start, local steps, finish, and the sum of their updates.

The clients of a chunk are carried at once under `torch.vmap`, or run one after another; either way a client's
functions see one client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor

from hierfl.core.device import CPU, moved, on
from hierfl.core.trees import Tree, named_leaves, scaled, tree_leaves, tree_map
from hierfl.data.batch import full_batch
from hierfl.engine.aggregate import LogSum, summed
from hierfl.engine.compiled import Loop
from hierfl.engine.federation import Federation
from hierfl.engine.minibatches import Active, batch_of, steps
from hierfl.engine.over_clients import over_batch, over_clients, where_working
from hierfl.method import LogShare, Phase, Share, Up
from hierfl.program.failures import why_it_fails


class ClientError(RuntimeError):
    """A client fails, or its update is not finite; the message names the client and the round."""


class Task(NamedTuple):
    """What one round of a chunk of C clients is computed from.

    message: of the server.
    own: the clients' states, C in front.
    ids: (C,) int64, the clients' positions in the data.
    round: number of the round.
    slots: the chunk is padded to as many clients; 0: as many as there are.
    """

    message: Tree
    own: Tree
    ids: Tensor
    round: int
    slots: int


class Done(NamedTuple):
    """What one round of a chunk of C clients gives.

    sums: the sums of their shares, by name.
    own: the clients' new states, C in front.
    """

    sums: dict[str, Share | LogSum]
    own: Tree


def work_on(federation: Federation, phases: tuple[Phase, ...], task: Task) -> Done:
    """Run one round of a chunk of clients, on the federation's device; the result is on the CPU.

    Raises:
        ClientError: a client fails, or its update is not finite.
    """
    with on(federation.device):
        task = moved(task, federation.device)
        full = _padded(task)
        try:
            done = client_round(federation, phases, full.message, full.own, full.ids, full.round)
        except (RuntimeError, ValueError) as error:  # such as those of torch's linear algebra
            raise _blamed(federation, phases, task, error) from error
        ups, own = tree_map(lambda v: v[: len(task.ids)], done)
        sums = {name: summed(up) for name, up in ups.items()}
        _check_finite(sums, ups, federation, task)
    result: Done = moved(Done(sums, own), CPU)
    return result


def _padded(task: Task) -> Task:
    """Return a task whose last client is repeated until all slots are filled."""
    if len(task.ids) >= task.slots:
        return task
    client = torch.arange(task.slots).clamp(max=len(task.ids) - 1)
    return task._replace(ids=task.ids[client], own=tree_map(lambda v: v[client], task.own))


def client_round(
    federation: Federation,
    phases: tuple[Phase, ...],
    message: Tree,
    own: Tree,
    ids: Tensor,
    round_: int,
) -> tuple[dict[str, Any], Tree]:
    """Run one round of some clients.

    Args:
        federation: whose clients.
        phases: the local steps.
        message: of the server.
        own: the clients' states, C in front.
        ids: (C,) int64, the clients' positions in the data.
        round_: number of the round.

    Returns:
        What each client sends, values times weights, C in front; and the clients' new states, C in front.
    """
    client, at_once = federation.client, federation.at_once

    def finish(work: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        up, own = client.finish(work, message, own, rows)
        return {name: _weighted(share) for name, share in up.items()}, own

    rows = federation.rows.counts[ids].to(torch.get_default_dtype())
    with pyro.validation_enabled(False):
        work = over_clients(lambda own: client.start(message, own), at_once)(own, count=len(ids))
        for p, phase in enumerate(phases):
            work = _after_phase(federation, (round_, p), phase, work, message, ids)
        answer: tuple[dict[str, Any], Tree] = over_clients(finish, at_once)(
            work, own, rows, count=len(ids)
        )
    return answer


def _after_phase(
    federation: Federation,
    at: tuple[int, int],
    phase: Phase,
    work: Tree,
    message: Tree,
    ids: Tensor,
) -> Tree:
    """Return the clients' working states after a phase; `at` is the round and the number of the phase."""
    step = local_step(phase, federation.at_once)
    each = steps(federation.rows, ids, phase, seed=federation.seed, at=at)
    if federation.graphs is None or not federation.at_once:
        for tensors, active in each:
            work = step(work, message, tensors, active)
        return work
    loop = Loop(federation.graphs, (at[1], phase.step), step, work, message)
    for tensors, active in each:
        loop.step(tensors, active)
    return loop.value()


def local_step(phase: Phase, at_once: bool) -> Callable[[Tree, Tree, Tree, Active], Tree]:
    """Return a local step of C clients as a pure function of trees of tensors.

    Args:
        phase: of the step.
        at_once: carry the clients under `torch.vmap`; else one after another.

    Returns:
        (working states, message, the step's tensors, which clients still work) -> working states; the last
        two are as `steps` yields them.
    """

    def step(work: Tree, message: Tree, tensors: Tree, active: Active) -> Tree:
        new = over_batch(lambda work, batch: phase.step(work, message, batch), at_once)(
            work, batch_of(tensors, phase)
        )
        return where_working(active[0], new, work) if active else new

    return step


def _weighted(share: Share | LogShare) -> Share | LogShare:
    """Return a share with its value multiplied by its weight; log weights are applied in the sum."""
    if isinstance(share, LogShare):
        return LogShare(
            share.value, torch.as_tensor(share.log_weight, dtype=torch.get_default_dtype())
        )
    weight = torch.as_tensor(share.weight, dtype=torch.get_default_dtype())
    return Share(scaled(share.value, weight), weight)


def _blamed(
    federation: Federation, phases: tuple[Phase, ...], task: Task, error: Exception
) -> ClientError:
    """Return the error of a chunk naming the client at fault, found by running clients one by one."""
    alone = replace(federation, engine="sequential", graphs=None)
    for i in range(len(task.ids)):
        own, ids = tree_map(lambda v, i=i: v[i : i + 1], (task.own, task.ids))
        try:
            client_round(alone, phases, task.message, own, ids, task.round)
        except (RuntimeError, ValueError) as own_error:
            name = federation.data.names[int(ids)]
            batch = full_batch(federation.rows, ids)
            why = why_it_fails("round", own_error, batch)
            return ClientError(f"round {task.round}: client '{name}': {why}")
    why = why_it_fails("step", error, full_batch(federation.rows, task.ids[:1]))
    return ClientError(
        f"round {task.round}: a step of {len(task.ids)} clients fails, though none fails alone: {why}"
    )


def _check_finite(
    sums: dict[str, Share | LogSum], ups: Up, federation: Federation, task: Task
) -> None:
    """Refuse updates with NaN or infinity, naming the first client at fault."""
    # a sum is finite only if all its terms are
    if all(bool(leaf.sum().isfinite()) for leaf in tree_leaves(sums)):
        return
    for path, leaf in named_leaves(ups).items():
        bad = ~leaf.isfinite().flatten(1).all(1) if leaf.dim() > 1 else ~leaf.isfinite()
        if bool(bad.any()):
            name = federation.data.names[int(task.ids[bad.nonzero()[0, 0]])]
            mend = "scale its rows (hierfl.standardise), or tighten the prior"
            if federation.rates:
                mend = (
                    f"lower the learning rate ({', '.join(federation.rates)}), or tighten the prior"
                )
            raise ClientError(
                f"round {task.round}: the update of client '{name}' is not finite ({path}; {int(bad.sum())} "
                f"of {len(task.ids)} clients): {mend} that lets its weights grow"
            )
