"""One round of one chunk of clients: start, local steps, finish, and the sum of their updates.

The clients of a chunk are carried at once under `torch.vmap`, or run one after another; either way
a client's functions see one client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hierfl.core.device import CPU, moved, on
from hierfl.core.trees import Tree, named_leaves, nbytes, restored, times, tree_leaves, tree_map
from hierfl.data.batch import full_batch
from hierfl.engine.aggregate import LogSum, Sums, not_finite, summed, update_norms
from hierfl.engine.compiled import Loop
from hierfl.engine.federation import Federation
from hierfl.engine.minibatches import Active, batch_of, steps
from hierfl.engine.over_clients import over_batch, over_clients, where_working
from hierfl.method import Each, LogShare, Phase, Reports, Share, Up
from hierfl.program.failures import why_it_fails
from hierfl.program.handlers import unchecked

# such as those of torch's linear algebra, and of a lookup by a client's rows
FAILURES = (RuntimeError, ValueError, ArithmeticError, LookupError)


class ClientError(RuntimeError):
    """A client fails, or its update is not finite; the message names the client and the round."""


class Task(NamedTuple):
    """A round of a chunk of clients `ids` (C,), with their states in front, padded to `slots`."""

    message: Tree
    own: Tree
    ids: Tensor
    round: int
    slots: int


class LeftOut(NamedTuple):
    """A client that is left out of a round: its position in the data, and why."""

    client: int
    reason: str


class Done(NamedTuple):
    """What a round of a chunk gives: sums, new states, ids and norms of those counted, the others.

    `sums` is empty where all clients are left out; `sent` are the bytes of the counted clients.
    """

    sums: Sums
    own: Tree
    ids: Tensor
    norms: dict[str, Tensor]
    left_out: tuple[LeftOut, ...] = ()
    sent: int = 0


def work_on(federation: Federation, phases: tuple[Phase, ...], task: Task) -> Done:
    """Run one round of a chunk of clients on the federation's device; the result is on the CPU."""
    with on(federation.device):
        task = moved(task, federation.device)
        if federation.settings.on_client_error == "skip":
            task, ups, own, left_out = _skipping(federation, phases, task)
        else:
            left_out = ()
            try:
                ups, own = _ups(federation, phases, task)
            except FAILURES as error:
                raise _blamed(federation, phases, task, error) from error
        result: Done = moved(counted(federation, task, ups, own, left_out), CPU)
    return result


def counted(
    federation: Federation, task: Task, ups: Up, own: Tree, left_out: tuple[LeftOut, ...]
) -> Done:
    """Return the sums of what clients send; `ups` (C, ...) are values times weights."""
    sent, ups = nbytes(ups), restored(ups)
    sums = {name: _summed(up, task.ids, federation) for name, up in ups.items()}
    _check_finite(sums, ups, federation, task)
    norms = {name: update_norms(up) for name, up in ups.items()}
    return Done(sums, own, task.ids, norms, left_out, sent)


def _ups(federation: Federation, phases: tuple[Phase, ...], task: Task) -> tuple[Up, Tree]:
    """Return what each client of a chunk sends, values times weights, and the new states."""
    ids, own = task.ids, task.own
    if len(ids) < task.slots:  # the last client is repeated until all slots are filled
        place = torch.arange(task.slots).clamp(max=len(ids) - 1)
        ids, own = ids[place], _rows(own, place)
    done = client_round(federation, phases, task.message, own, ids, task.round)
    answer: tuple[Up, Tree] = tree_map(lambda v: v[: len(task.ids)], done)
    return answer


def _skipping(
    federation: Federation, phases: tuple[Phase, ...], task: Task
) -> tuple[Task, Up, Tree, tuple[LeftOut, ...]]:
    """Run a chunk without failing clients; return task, updates, states and those clients."""
    left_out: dict[int, str] = {}
    while len(task.ids):
        # a compiled step may overwrite the states that it is given
        given = task._replace(own=tree_map(torch.clone, task.own))
        try:
            ups, own = _ups(federation, phases, given)
        except FAILURES as error:
            failing = dict(_failing(federation, phases, task))
            if not failing:
                raise _blamed(federation, phases, task, error) from error
            left_out |= {i: f"it fails: {_sentence(why)}" for i, why in failing.items()}
            task = _some(task, _others(task, [int(i) in failing for i in task.ids]))
            continue
        bad = not_finite(ups, own, task.own)
        if not bad:
            return task, ups, own, _named(left_out)
        left_out |= {int(task.ids[place]): why for place, why in bad.items()}
        good = _others(task, [k in bad for k in range(len(task.ids))])
        task, ups, own = _some(task, good), _rows(ups, good), _rows(own, good)
        return task, ups if len(good) else {}, own, _named(left_out)
    return task, {}, task.own, _named(left_out)


def _named(left_out: dict[int, str]) -> tuple[LeftOut, ...]:
    return tuple(LeftOut(client, reason) for client, reason in left_out.items())


def _others(task: Task, bad: list[bool]) -> Tensor:
    """Return the places in the chunk of the clients that are not bad, (C,) int64."""
    return (~torch.tensor(bad, device=task.ids.device)).nonzero()[:, 0]


def _rows(tree: Tree, places: Tensor) -> Tree:
    return tree_map(lambda v: v[places], tree)


def _some(task: Task, places: Tensor) -> Task:
    """Return the task of the clients at some places of the chunk."""
    return task._replace(ids=task.ids[places], own=_rows(task.own, places))


def _sentence(error: Exception) -> str:
    """Return the first line of an error's message, or the error's name where it has none."""
    text = str(error).strip().split("\n")[0][:200]
    return text or type(error).__name__


def once_each(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Return phases of at most one step, after which an update has its names, shapes and dtypes."""
    return tuple(replace(phase, count=min(phase.count, 1)) for phase in phases)


def client_round(
    federation: Federation,
    phases: tuple[Phase, ...],
    message: Tree,
    own: Tree,
    ids: Tensor,
    round_: int,
) -> tuple[dict[str, Any], Tree]:
    """Run one round of clients `ids` (C,); return their updates times weights, and states."""
    client, at_once = federation.client, federation.at_once

    def finish(work: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        up, own = client.finish(work, message, own, rows)
        return {name: _weighted(share) for name, share in up.items()}, own

    rows = federation.rows.counts[ids].to(torch.get_default_dtype())
    with unchecked():
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
    """Return the working states after a phase; `at` holds the numbers of round and phase."""
    step = local_step(phase, federation.at_once)
    compiled = federation.graphs is not None and federation.at_once
    each = steps(federation.rows, ids, phase, seed=federation.seed, at=at, few_widths=compiled)
    if federation.graphs is None or not federation.at_once:
        for tensors, active in each:
            work = step(work, message, tensors, active)
        return work
    loop = Loop(federation.graphs, (at[1], phase.step), step, work, message)
    for tensors, active in each:
        loop.step(tensors, active)
    return loop.value()


def local_step(phase: Phase, at_once: bool) -> Callable[[Tree, Tree, Tree, Active], Tree]:
    """Return a step of C clients as a pure function of (work, message, step's tensors, active)."""

    def step(work: Tree, message: Tree, tensors: Tree, active: Active) -> Tree:
        if phase.together:
            new = phase.step(work, message, batch_of(tensors, phase))
            return where_working(active[0], new, work) if active else new
        new = over_batch(lambda work, batch: phase.step(work, message, batch), at_once)(
            work, batch_of(tensors, phase)
        )
        return where_working(active[0], new, work) if active else new

    return step


def _summed(
    share: Share | LogShare | Each, ids: Tensor, federation: Federation
) -> Share | LogSum | Reports:
    """Return the sum of the clients' shares; what is not to be summed goes on as it is."""
    if not isinstance(share, Each):
        return summed(share)
    if federation.discloses == "sums":
        raise TypeError(
            "a client sends a value of its own, Each, but its method discloses sums alone: send a "
            "Share, or "
            'declare Method(..., discloses="summaries")'
        )
    return Reports(share.value, ids)


def _weighted(share: Share | LogShare | Each) -> Share | LogShare | Each:
    """Return a share with its value times its weight; log weights are applied in the sum."""
    if isinstance(share, Each):
        return share
    if isinstance(share, LogShare):
        return LogShare(
            share.value, torch.as_tensor(share.log_weight, dtype=torch.get_default_dtype())
        )
    weight = torch.as_tensor(share.weight, dtype=torch.get_default_dtype())
    return Share(times(share.value, weight), weight)


def _failing(
    federation: Federation, phases: tuple[Phase, ...], task: Task
) -> Iterator[tuple[int, Exception]]:
    """Run the clients of a chunk one by one; yield position and error of each that fails."""
    settings = replace(federation.settings, engine="sequential")
    alone = replace(federation, settings=settings, graphs=None)
    for i in range(len(task.ids)):
        own, ids = tree_map(lambda v, i=i: v[i : i + 1], (task.own, task.ids))
        try:
            client_round(alone, phases, task.message, own, ids, task.round)
        except FAILURES as error:
            yield int(ids), error


def _blamed(
    federation: Federation, phases: tuple[Phase, ...], task: Task, error: Exception
) -> ClientError:
    """Return the error of a chunk that names the client at fault; clients are run one by one."""
    for client, own_error in _failing(federation, phases, task):
        name = federation.data.names[client]
        batch = full_batch(federation.rows, torch.tensor([client]))
        why = why_it_fails("round", own_error, batch)
        return ClientError(f"round {task.round}: client '{name}': {why}")
    why = why_it_fails("step", error, full_batch(federation.rows, task.ids[:1]))
    return ClientError(
        f"round {task.round}: a step of {len(task.ids)} clients fails, though none fails alone: "
        f"{why}"
    )


def _check_finite(sums: Sums, ups: Up, federation: Federation, task: Task) -> None:
    """Refuse updates with NaN or infinity, naming the first client at fault."""
    # a sum is finite only if all its terms are
    if all(bool(leaf.sum().isfinite()) for leaf in tree_leaves(sums)):
        return
    for path, leaf in named_leaves(ups).items():
        bad = ~leaf.isfinite().flatten(1).all(1) if leaf.dim() > 1 else ~leaf.isfinite()
        if bool(bad.any()):
            name = federation.data.names[int(task.ids[bad.nonzero()[0, 0]])]
            fix = "scale its rows (hierfl.standardize), or tighten the prior"
            if federation.rates:
                fix = (
                    f"lower the learning rate ({', '.join(federation.rates)}), or tighten the prior"
                )
            raise ClientError(
                f"round {task.round}: the update of client '{name}' is not finite ({path}; "
                f"{int(bad.sum())} of {len(task.ids)} clients): {fix} that lets its weights grow"
            )
