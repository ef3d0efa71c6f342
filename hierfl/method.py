"""The contract of a method, and the few verbs that methods are written in.

A client's functions are written for *one* client, in plain shapes: `start(message, own) -> lane`, phases of
`step(lane, message, batch) -> lane`, `finish(lane, message, own, rows) -> (up, own)`. The engine runs them one client after
another, or a cohort at once under `torch.vmap`; a node of a real federation runs them as they are. They are pure: tensors in,
tensors out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.program.program import Params, Program
from hierfl.program.sites import Family, Guide, Model


class Clock(NamedTuple):
    """Which round it is, of how many, and how many clients take part in it (0: none is asked)."""

    round: int
    rounds: int
    clients: int = 0


class Share(NamedTuple):
    """What a client adds to a weighted mean: the server sees the cohort's sums of weight * value and of weight, nothing else."""

    value: Tree
    weight: float | Tensor = 1.0


class LogShare(NamedTuple):
    """A share whose weight is given by its logarithm: weights as small as exp(-1e6) are no zero, for all are divided by their sum.

    A cohort's sum of such shares is its weighted mean, the log of the sum of weights, and the log of the sum of their squares:
    the effective number of clients, (sum of weights)^2 / sum of squares, is logged. Who sums must know the largest log weight.
    """

    value: Tree
    log_weight: float | Tensor = 0.0


Up = Mapping[str, Share | LogShare]
Step = Callable[[Tree, Tree, ClientBatch], Tree]
Pooled = Callable[[Tree, Tree, ClientBatch, Clock], tuple[Tree, Tree, dict[str, float]]]


@dataclass(frozen=True)
class Phase:
    """`count` local steps, or epochs, of one kind.

    Args:
        step: (lane, message, batch) -> lane, on one mini-batch, or on all rows.
        count: how many.
        unit: "step": mini-batches from reshuffled passes over the rows; "epoch": whole passes, the last batch of each smaller.
        batch_size: rows a mini-batch; None: all rows at each step.
    """

    step: Step
    count: int = 1
    unit: Literal["step", "epoch"] = "step"
    batch_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        if self.count < 0:
            raise ValueError(f"a phase of {self.count} {self.unit}s: the count must be 0 or more")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(
                f"batch_size is {self.batch_size}: it must be 1 or more, or None for all rows"
            )


def _never(state: Tree) -> bool:
    return False


def _own_params(message: Tree, own: Tree) -> Params:
    params: Params = {**message, **own}
    return params


@dataclass(frozen=True, eq=False)
class Client:
    """One round of one client.

    Args:
        own: what a new client keeps before its first round (`{}`: the client is stateless).
        start: (message, own) -> lane, what it works on.
        phases: what it does.
        finish: (lane, message, own, rows it has) -> (up, own): all that crosses, and all that stays. A share that is one number
            is logged.
        params: (message, own) -> the program's params that its posterior and predictions are read from.
        adapt: phases of a client never seen, global params fixed; None: the same as `phases`.
        like_rows: message -> whether clients with like numbers of rows are to be carried together, in more chunks: where a step
            goes through its rows so often that padding costs more than starting anew.
        seen: own -> (), above 0 once the client has been through a round; None: its state does not tell.
    """

    own: Tree
    start: Callable[[Tree, Tree], Tree]
    phases: tuple[Phase, ...]
    finish: Callable[[Tree, Tree, Tree, Tensor], tuple[Up, Tree]]
    params: Callable[[Tree, Tree], Params] = _own_params
    adapt: tuple[Phase, ...] | None = None
    like_rows: Callable[[Tree], bool] = _never
    seen: Callable[[Tree], Tensor] | None = None


def _whole(state: Tree, clock: Clock) -> Tree:
    return state


def _nothing(state: Tree) -> dict[str, float]:
    return {}


@dataclass(frozen=True, eq=False)
class Server:
    """What the server keeps, sends and learns.

    Args:
        state: before the first round.
        update: (state, means, clock) -> state; `means` holds, by name, the cohort's weighted mean of each share.
        down: (state, clock) -> message, what every client of the cohort receives.
        finished: whether a state asks for no more rounds, however many were allowed.
        logged: state after a round -> numbers for its row of the history.
        final: (state, clock) -> message, that posterior and predictions are read with and new clients adapt to; None: `down`.
        relaxed: beta -> the same server with its step multiplied by beta; None: it cannot say, see `methods.over_relaxed`.
    """

    state: Tree
    update: Callable[[Tree, dict[str, Tree], Clock], Tree]
    down: Callable[[Tree, Clock], Tree] = _whole
    final: Callable[[Tree, Clock], Tree] | None = None
    finished: Callable[[Tree], bool] = _never
    logged: Callable[[Tree], dict[str, float]] = _nothing
    relaxed: Callable[[float], Server] | None = None

    def last(self, state: Tree, clock: Clock) -> Tree:
        """The message that posterior and predictions are read with."""
        return (self.final or self.down)(state, clock)


@dataclass(frozen=True, eq=False)
class Method:
    """Four choices: a model, a guide, what a client does, what the server does.

    Args:
        name: of the method.
        model: the generative program, a function of a `ClientBatch`.
        guide: a guide function, or a family from `hierfl.guides`.
        client: program -> Client.
        server: program -> Server.
        pooled: program -> (server state, table, batch of all clients, clock) -> (state, table, logged): a round of the method as
            one step of the pooled program; None: it has no such form.
        everyone: every client must take part in every round: a cohort of some is refused.
    """

    name: str
    model: Model
    guide: Guide | Family
    client: Callable[[Program], Client]
    server: Callable[[Program], Server]
    pooled: Callable[[Program], Pooled] | None = None
    everyone: bool = False


# ------------------------------------------------------------------------------------------------ the verbs
def inside(phases: tuple[Phase, ...], entry: str, after: Step | None = None) -> tuple[Phase, ...]:
    """Return phases that run on one entry of a larger working state, as a wrapper runs the method it wraps.

    Args:
        phases: the wrapped method's phases.
        entry: where its working state is kept in the larger one.
        after: what follows each step of the last phase that has steps, on the larger working state.
    """
    last = max((i for i, phase in enumerate(phases) if phase.count), default=None)
    return tuple(
        replace(phase, step=_inside(phase.step, entry, after if i == last else None))
        for i, phase in enumerate(phases)
    )


def _inside(step: Step, entry: str, after: Step | None) -> Step:
    def larger(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        work = {**work, entry: step(work[entry], message, batch)}
        return work if after is None else after(work, message, batch)

    return larger


def slope(loss: Callable[[Tree], Tensor], params: Tree) -> tuple[Tree, Tensor]:
    """Gradient and value of a loss, which may have one entry a client: of its sum, since clients share nothing."""
    answer: tuple[Tree, Tensor] = grad_and_value(lambda p: loss(p).sum())(params)
    return answer


def descend(loss: Callable[[Tree], Tensor], params: Tree, lr: float | Tensor) -> Tree:
    """One step of gradient descent: params - lr * grad loss."""
    gradient, _ = slope(loss, params)
    return tree_map(lambda p, g: p - lr * g, params, gradient)


def over_draws(
    loss: Callable[[ClientBatch], Tensor], batch: ClientBatch, draws: int, *, keyed: bool = True
) -> Tensor:
    """Mean of a loss over independent draws of its noise: one more dimension, not a loop (but where draws are not `keyed`)."""
    if draws == 1:
        return loss(batch)
    if not keyed:
        return torch.stack([loss(batch.redrawn(d)) for d in range(draws)]).mean(0)
    return torch.vmap(lambda d: loss(batch.redrawn(d)))(
        torch.arange(draws, dtype=torch.int32)
    ).mean(0)


def half_square(a: Tree, b: Tree) -> Tensor:
    """|a - b|^2 / 2 over two dicts of tensors."""
    return sum((0.5 * (a[k] - b[k]).square().sum() for k in a), torch.zeros(()))
