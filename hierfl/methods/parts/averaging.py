"""Parts of methods: steps down a loss, clients with params of their own, servers that take means."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hierfl.core.trees import Tree, chosen, lerp
from hierfl.data.batch import ClientBatch
from hierfl.method import Client, Clock, Phase, Server, Share, Step, Up, slope
from hierfl.optimizers import Optimizer, Stepped, step
from hierfl.program.program import Params, Program, ProgramError

Loss = Callable[[Params, Any, Tree, ClientBatch], Tensor]  # of params, work, message and batch


class OwnParams(NamedTuple):
    """The state of a client that keeps params of its own; `seen`, (), is 1 once it has been through a round."""

    params: Params
    seen: Tensor


class OwnAndMail(NamedTuple):
    """The same beside what the server writes for the client, `mail`."""

    params: Params
    mail: Params
    seen: Tensor


def personal_client(
    own: Tree,
    first: Callable[[Tree, Tree], Tree],
    *,
    start: Callable[[Tree, Tree], Tree],
    params: Callable[[Tree, Tree], Params],
    **others: Any,
) -> Client:
    """Return a client whose state is `first(message, own)` until it has been through a round.

    `start` and `params` get that state, or what the last round left. `own` has a field `seen`, as
    `OwnParams` has, which `finish` sets. `others` are further fields of `Client`.
    """

    def now(message: Tree, own: Tree) -> Tree:
        return chosen(own.seen, own, first(message, own))

    return Client(
        own=own,
        start=lambda message, own: start(message, now(message, own)),
        params=lambda message, own: params(message, now(message, own)),
        seen=lambda own: own.seen,
        **others,
    )


class DescentState(NamedTuple):
    """What a client descends with: params, the optimizer's memory, the last loss, (), and what it needs `beside`."""

    w: Params
    memory: Tree
    loss: Tensor
    beside: Tree = ()


@dataclass(frozen=True)
class Descent:
    """How a client descends in one round; the optimizer is restarted in each. `turns` as in `Phase`."""

    optimizer: Optimizer
    steps: int
    unit: Literal["step", "epoch"]
    batch_size: int | None
    turns: int = 1

    def begin(self, w: Params, beside: Tree = ()) -> DescentState:
        """Return the working state at params w."""
        return DescentState(w, self.optimizer.init(w), torch.zeros(()), beside)

    def moved(self, at: DescentState, loss: Callable[[Params], Tensor]) -> DescentState:
        """Return a working state after one step down a loss."""
        return self.stepped(at, *slope(loss, at.w))

    def stepped(self, at: DescentState, gradient: Params, loss: Tensor) -> DescentState:
        """Return a working state after one step along a gradient; `loss` is its last one, ()."""
        w, memory = step(self.optimizer, gradient, Stepped(at.w, at.memory))
        return DescentState(w, memory, loss, at.beside)

    def phase(self, loss: Loss) -> Phase:
        """Return steps down a loss: (w, working state, message, mini-batch) -> ()."""

        def move(work: DescentState, message: Tree, batch: ClientBatch) -> DescentState:
            return self.moved(work, lambda w: loss(w, work, message, batch))

        return self.taking(move)

    def taking(self, move: Step, steps: int | None = None) -> Phase:
        """Return the phase of a step, as often as the client descends, or `steps` times."""
        count = self.steps if steps is None else steps
        return Phase(move, count, self.unit, self.batch_size, turns=self.turns)

    def on_likelihood(self, program: Program) -> Phase:
        """Return steps down the mean negative log likelihood of a row, and nothing else."""
        return self.phase(lambda w, work, message, batch: program.mean_loss(w, batch))


class TwoLevels(NamedTuple):
    """A client's copy theta of the global params, its own params phi, the last loss, (), and what it needs `beside`."""

    theta: Stepped
    phi: Stepped
    loss: Tensor
    beside: Tree = ()


Target = Callable[[Params, dict[str, Tree]], Params]
Inside = Callable[[Params, Params], Params]


def averaging_server(
    start: Params,
    target: Target = lambda theta, means: means["theta"],
    *,
    beta: float = 1.0,
    inside: Inside | None = None,
    sent: Collection[str] | None = None,
) -> Server:
    """Return `theta <- inside(theta + beta (target - theta))`; params not `sent` keep their first values."""

    def of_round(theta: Params) -> Params:
        return theta if sent is None else {name: theta[name] for name in sent}

    def update(theta: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        before = of_round(theta)
        new = lerp(before, target(before, means), beta)
        return {**theta, **(new if inside is None else inside(new, before))}

    def relaxed(by: float) -> Server:
        return averaging_server(start, target, beta=by * beta, inside=inside, sent=sent)

    return Server(
        start,
        update,
        down=lambda theta, clock: of_round(theta),
        final=lambda theta, clock: theta,
        relaxed=relaxed,
    )


def stepping_server(
    theta: Params,
    optimizer: Optimizer,
    gradient: Callable[[dict[str, Tree]], Tree],
    down: Callable[[Stepped, Clock], Tree] = lambda state, clock: state.params,
    rate: Callable[[Clock], float] = lambda clock: 1.0,
) -> Server:
    """Return the server whose optimizer, times a rate, steps along a gradient made of the means."""

    def update(state: Stepped, means: dict[str, Tree], clock: Clock) -> Stepped:
        return step(optimizer, gradient(means), state, rate(clock))

    return Server(Stepped(theta, optimizer.init(theta)), update, down=down)


def plain_average(program: Program) -> Server:
    """Return the server theta <- the weighted mean of the clients' copies, of all global params."""
    return averaging_server(program.start()[0])


def common_params(program: Program, name: str) -> Params:
    """Return the starting values of a program's params, all of them global."""
    above, own = program.start()
    if own or program.latents.sites:
        raise ProgramError(
            f"{name} fits global params only, and this model has latent sites or local params: "
            f"use models.network, or fedsvi"
        )
    return above


def expect_model(model: object, kind: type, method: str, options: str) -> None:
    """Refuse a model of another kind than a method reads."""
    if not isinstance(model, kind):
        raise TypeError(
            f"{method} reads more of a model than its output: pass models.{kind.__name__}(module, {options})"
        )


def averaging_client(descent: Descent, *phases: Phase, **others: Any) -> Client:
    """Return the client of FedAvg: a stateless one that descends from the server's params and sends its copy."""
    return Client(
        own={},
        start=lambda message, own: descent.begin(message),
        phases=phases,
        finish=lambda work, message, own, rows: (copies(work, rows), own),
        **others,
    )


def copies(work: DescentState, rows: Tensor) -> Up:
    """Return what a client of FedAvg sends, weighted by rows: its copy, and its last loss."""
    return {"theta": Share(work.w, rows), "loss": Share(work.loss, rows)}


def proximal_loss(
    program: Program, w: Params, center: Params, prox: float, batch: ClientBatch
) -> Tensor:
    """Return nll(w) + prox |w - center|^2 / 2, nll the mean negative log likelihood of a row, ()."""
    nll = program.mean_loss(w, batch)
    halves = (0.5 * (w[name] - center[name]).square().sum() for name in w)
    return nll + prox * sum(halves, torch.zeros(())) if prox else nll


def parts(batch: ClientBatch, size: int, number: int = 2) -> tuple[ClientBatch, ...]:
    """Split one client's batch into batches of at most `size` rows, starting over once its rows run out."""
    count = torch.as_tensor(batch.num_rows) if batch.rows is None else batch.rows.sum()
    place = torch.arange(size)
    mask = None if batch.rows is None and batch.num_rows >= size else (place < count)[None]

    def taken(index: Tensor) -> ClientBatch:
        fields = {n: v.index_select(1, index % count) for n, v in batch.fields.items()}
        return replace(batch, fields=fields, rows=mask)

    return tuple(taken(part * size + place) for part in range(number))
