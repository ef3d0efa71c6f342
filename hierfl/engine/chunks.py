"""One round of one chunk of clients: start, local steps, finish, and the sum of their updates."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hierfl.core.process import CPU, moved, on
from hierfl.core.trees import Tree, named_leaves, nbytes, restored, times, tree_leaves, tree_map
from hierfl.data.batch import ClientBatch, full_batch
from hierfl.engine.aggregate import Sums, not_finite, summed, update_norms
from hierfl.engine.compiled import Loop
from hierfl.engine.federation import Federation, step_sizes
from hierfl.engine.minibatches import Active, batch_of, steps
from hierfl.method import Each, LogShare, Phase, Reports, Share, Up
from hierfl.program.failures import root_of, why_it_fails
from hierfl.program.handlers import unchecked


def over_clients(one: Callable[..., Tree], at_once: bool, *trees: Tree, count: int) -> Tree:
    """Apply a function of one client to trees of `count`, under `torch.vmap` (`at_once`) or in turn."""
    if at_once:
        index = torch.arange(count)  # vmap needs a tensor to map over; trees may have none
        return torch.vmap(lambda _, *t: tree_map(torch.as_tensor, one(*t)))(index, *trees)
    trees_of = [one(*(tree_map(lambda v, i=i: v[i], t) for t in trees)) for i in range(count)]
    return tree_map(lambda *v: torch.stack(v), *trees_of)


def over_batch(
    one: Callable[[Tree, ClientBatch], Tree], at_once: bool, work: Tree, batch: ClientBatch
) -> Tree:
    """Apply a function (work, batch) -> work of one client to C clients."""
    slots, shared = slots_of(batch)

    def of_slot(work: Tree, slot: Tree) -> Tree:
        return one(work, one_slot(slot, shared, batch))

    return over_clients(of_slot, at_once, work, slots, count=batch.num_clients)


def slots_of(batch: ClientBatch) -> tuple[Tree, Tree]:
    """Split a batch of C clients into slots (C, 1, ...), to be mapped over, and what they share."""
    own = {
        "fields": dict(batch.fields),
        "client_fields": dict(batch.client_fields),
        "rows": {} if batch.rows is None else {"rows": batch.rows},
        "counts": batch.counts,
        "keys": batch.own_keys,
    }
    words = map(partial(torch.as_tensor, dtype=torch.int32), batch.words)
    slots: Tree = tree_map(lambda value: value[:, None], own)
    return slots, {"root": batch.root, "words": tuple(words)}


def one_slot(slot: Tree, shared: Tree, like: ClientBatch) -> ClientBatch:
    """Return the batch of one client from the trees of `slots_of`, as `like` was split."""
    return replace(
        like,
        fields=slot["fields"],
        client_fields=slot["client_fields"],
        rows=slot["rows"].get("rows"),
        counts=slot["counts"],
        own_keys=slot["keys"],
        **shared,
    )


# such as those of torch's linear algebra, and of a lookup by a client's rows
FAILURES = (RuntimeError, ValueError, ArithmeticError, LookupError)
# not a program's mistake; mypy does not see the name in torch.linalg
NUMERICAL = (FloatingPointError, vars(torch.linalg)["LinAlgError"])


class ClientError(RuntimeError):
    """A client fails, or its update is not finite; the message names the client and the round."""


class NotFinite(ClientError):
    """A client's update is not finite, or its numbers have no digits left: its program may be right."""


class Task(NamedTuple):
    """A round of a chunk of clients `ids` (C,), with their states in front, padded to `slots`."""

    message: Tree
    own: Tree
    ids: Tensor
    round: int
    slots: int


class LeftOutClient(NamedTuple):
    """A client that is left out of a round: its position in the data, and why."""

    client: int
    reason: str


class Done(NamedTuple):
    """What a round of a chunk gives; `sums` is empty if no client counts, `sent` are bytes of those that do."""

    sums: Sums
    own: Tree
    ids: Tensor
    norms: dict[str, Tensor]
    left_out: tuple[LeftOutClient, ...] = ()
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
    federation: Federation, task: Task, ups: Up, own: Tree, left_out: tuple[LeftOutClient, ...]
) -> Done:
    """Return the sums of what clients send; `ups` (C, ...) are values times weights."""
    sent, ups = nbytes(ups), restored(ups)
    sums: Sums = {}
    norms: dict[str, Tensor] = {}
    for name, up in ups.items():
        if isinstance(up, Each) and federation.method.discloses == "sums":
            raise TypeError(
                "a client sends a value of its own, Each, but its method discloses sums alone: "
                'send a Share, or declare Method(..., discloses="summaries")'
            )
        sums[name] = Reports(up.value, task.ids) if isinstance(up, Each) else summed(up)
        norms[name] = update_norms(up)
    _check_finite(sums, ups, federation, task)
    return Done(sums, own, task.ids, norms, left_out, sent)


def _ups(federation: Federation, phases: tuple[Phase, ...], task: Task) -> tuple[Up, Tree]:
    """Return what each client of a chunk sends, values times weights, and the new states."""
    ids, own, count = task.ids, task.own, len(task.ids)
    if count < task.slots:  # the last client is repeated until all slots are filled
        place = torch.arange(task.slots).clamp(max=count - 1)
        ids, own = ids[place], _rows(own, place)
    done = client_round(federation, phases, task.message, own, ids, task.round)
    answer: tuple[Up, Tree] = done if count == len(ids) else _rows(done, slice(count))
    return answer


def _skipping(
    federation: Federation, phases: tuple[Phase, ...], task: Task
) -> tuple[Task, Up, Tree, tuple[LeftOutClient, ...]]:
    """Run a chunk without failing clients; return task, updates, states and those clients."""
    left_out: list[LeftOutClient] = []

    def without(bad: Mapping[int, str]) -> Tensor:
        """Leave out the clients at some places of the chunk; return the places of the others."""
        nonlocal task
        left_out.extend(LeftOutClient(int(task.ids[place]), why) for place, why in bad.items())
        good = torch.tensor([k for k in range(len(task.ids)) if k not in bad], dtype=torch.long)
        good = good.to(task.ids.device)
        task = task._replace(ids=task.ids[good], own=_rows(task.own, good))
        return good

    while len(task.ids):
        # a compiled step may overwrite the states that it is given
        copied = task._replace(own=tree_map(torch.clone, task.own))
        try:
            ups, own = _ups(federation, phases, copied)
        except FAILURES as error:
            failing = dict(_failing(federation, phases, task))
            if not failing:
                raise _blamed(federation, phases, task, error) from error
            without({k: f"it fails: {_sentence(why)}" for k, why in failing.items()})
            continue
        if bad := not_finite(ups, own, task.own):
            good = without(bad)
            ups, own = _rows(ups, good) if len(good) else {}, _rows(own, good)
        return task, ups, own, tuple(left_out)
    return task, {}, task.own, tuple(left_out)


def _rows(tree: Tree, places: Tensor | slice) -> Tree:
    return tree_map(lambda v: v[places], tree)


def _sentence(error: Exception) -> str:
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
        return _weighted(up), own

    rows = federation.rows.counts[ids].to(torch.get_default_dtype())
    with unchecked():
        work = over_clients(partial(client.start, message), at_once, own, count=len(ids))
        for p, phase in enumerate(phases):
            work = _after_phase(federation, (round_, p), phase, work, message, ids)
        answer: tuple[dict[str, Any], Tree]
        answer = over_clients(finish, at_once, work, own, rows, count=len(ids))
    return answer


def _after_phase(
    federation: Federation,
    at: tuple[int, int],
    phase: Phase,
    work: Tree,
    message: Tree,
    ids: Tensor,
) -> Tree:
    step = local_step(phase, federation.at_once)
    # a step that reads no rows is taken once a round: compiling it would take longer than it saves
    graphs = federation.graphs if federation.at_once and phase.scores_rows else None
    narrow = graphs is not None
    batches = steps(federation.rows, ids, phase, seed=federation.seed, at=at, few_widths=narrow)
    if graphs is None:
        for tensors, active in batches:
            work = step(work, message, tensors, active)
        return work
    loop = Loop(graphs, (at[1], phase.step), step, work, message)
    for step_of, later in pairwise(chain(batches, (None,))):
        assert step_of is not None
        loop.step(*step_of, last=later is None)
    return loop.value()


def local_step(phase: Phase, at_once: bool) -> Callable[[Tree, Tree, Tree, Active], Tree]:
    """Return a step of C clients as a pure function of (work, message, step's tensors, active)."""

    def step(work: Tree, message: Tree, tensors: Tree, active: Active) -> Tree:
        def one(work: Tree, batch: ClientBatch) -> Tree:
            return phase.step(work, message, batch)

        batch = batch_of(tensors, phase)
        new = one(work, batch) if phase.together else over_batch(one, at_once, work, batch)
        if not active:
            return new
        on = active[0]  # the others keep their working states
        return tree_map(
            lambda n, o: torch.where(on.view(-1, *[1] * (n.dim() - 1)), n, o), new, work
        )

    return step


def _weighted(up: Up) -> dict[str, Share | LogShare | Each]:
    """Return shares with their values times their weights; log weights are applied in the sum."""
    as_float = partial(torch.as_tensor, dtype=torch.get_default_dtype())
    shares: dict[str, Share | LogShare | Each] = {}
    for name, share in up.items():
        if isinstance(share, Share):
            weight = as_float(share.weight)
            share = Share(times(share.value, weight), weight)
        elif isinstance(share, LogShare):
            share = LogShare(share.value, as_float(share.log_weight))
        shares[name] = share
    return shares


def _failing(
    federation: Federation, phases: tuple[Phase, ...], task: Task
) -> Iterator[tuple[int, Exception]]:
    """Run the clients of a chunk one by one; yield place and error of each that fails."""
    settings = replace(federation.settings, engine="sequential")
    alone = replace(federation, settings=settings, graphs=None)
    for i in range(len(task.ids)):
        own, ids = _rows((task.own, task.ids), slice(i, i + 1))
        try:
            client_round(alone, phases, task.message, own, ids, task.round)
        except FAILURES as error:
            yield i, error


def _blamed(
    federation: Federation, phases: tuple[Phase, ...], task: Task, error: Exception
) -> ClientError:
    """Return the error of a chunk that names the client at fault; clients are run one by one."""
    for place, own_error in _failing(federation, phases, task):
        client = task.ids[place : place + 1]
        why = why_it_fails("round", own_error, full_batch(federation.rows, client))
        kind = NotFinite if isinstance(root_of(own_error), NUMERICAL) else ClientError
        return kind(f"round {task.round}: client '{federation.data.names[int(client)]}': {why}")
    why = why_it_fails("step", error, full_batch(federation.rows, task.ids[:1]))
    return ClientError(
        f"round {task.round}: a step of {len(task.ids)} clients fails, though none fails alone: "
        f"{why}"
    )


def _check_finite(sums: Sums, ups: Up, federation: Federation, task: Task) -> None:
    for leaf in tree_leaves(sums):
        if not bool(leaf.sum().isfinite()):  # a sum is finite only if all its terms are
            break
    else:
        return
    for path, leaf in named_leaves(ups).items():
        bad = ~leaf.isfinite().reshape(len(leaf), -1).all(1)
        if bool(bad.any()):
            name = federation.data.names[int(task.ids[bad.nonzero()[0, 0]])]
            fix = (
                "the log density of its rows, or a derivative of it, is not finite. See whether the "
                "program takes the logarithm or root of 0, observes a distribution that ends where a "
                "latent site says (Uniform, Pareto), or takes torch.where of a branch that is "
                "infinite; tighten vague priors, and scale large columns (hierfl.standardize)"
            )
            if rates := ", ".join(step_sizes(federation.method)):
                lower = f"lower the learning rate ({rates}), or tighten the prior of what grows"
                fix = lower if task.round else f"{lower}; or {fix}"  # in round 0 little has grown
            raise NotFinite(
                f"round {task.round}: the update of client '{name}' is not finite ({path}; "
                f"{int(bad.sum())} of {len(task.ids)} clients): {fix}"
            )
