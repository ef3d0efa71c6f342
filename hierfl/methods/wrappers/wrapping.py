"""What wrappers of a method share: its phases and its state inside larger ones, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.method import Client, Method, Phase, Server, Share, Step, Trait, Up
from hierfl.program.program import Program, ProgramError


def wrapped(method: Method, name: str, *, trait: Trait | None = None, **changes: Any) -> Method:
    """Return a method with other parts; it may never settle, so `most_rounds` is unknown."""
    traits = method.traits if trait is None else method.traits | {trait}
    return replace(method, name=name, most_rounds=None, traits=traits, **changes)


def is_logged(value: Tree) -> bool:
    """Return whether a share's value is a scalar, which is for the history alone."""
    return isinstance(value, Tensor) and value.numel() == 1


def as_share(sent: object, name: str, why: str) -> Share:
    """Return what a client sends as a share; refuse another kind, which a wrapper cannot weight."""
    if not isinstance(sent, Share):
        raise ProgramError(
            f"{why}, and a client sends {name} as a {type(sent).__name__}: wrap a method of plain "
            "means, such as fedavg"
        )
    return sent


def inside(phases: tuple[Phase, ...], after: Step | None = None) -> tuple[Phase, ...]:
    """Return phases on the field `method` of a larger working state; `after` follows steps of the last."""
    last = max((i for i, phase in enumerate(phases) if phase.count), default=None)
    return tuple(
        replace(phase, step=_inside(phase.step, after if i == last else None))
        for i, phase in enumerate(phases)
    )


def _inside(step: Step, after: Step | None) -> Step:
    def larger(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        work = work._replace(method=step(work.method, message, batch))
        return work if after is None else after(work, message, batch)

    return larger


class WrappedState(NamedTuple):
    """The state of a wrapped method's client or server, and what its wrapper keeps beside it."""

    method: Tree
    extra: Tree


def beside(plain: Client, extra: Tree) -> Client:
    """Return a client that keeps `extra` beside its own state, hidden from its own functions."""

    def finish(work: Tree, message: Tree, own: WrappedState, rows: Tensor) -> tuple[Up, Tree]:
        up, after = plain.finish(work, message, own.method, rows)
        return up, WrappedState(after, own.extra)

    def settle(message: Tree, own: WrappedState, batch: ClientBatch) -> WrappedState:
        assert plain.settle is not None
        return WrappedState(plain.settle(message, own.method, batch), own.extra)

    def new(message: Tree) -> WrappedState:
        return WrappedState(plain.own if plain.new is None else plain.new(message), extra)

    seen = plain.seen
    return replace(
        plain,
        own=WrappedState(plain.own, extra),
        start=lambda message, own: plain.start(message, own.method),
        finish=finish,
        params=lambda message, own: plain.params(message, own.method),
        seen=None if seen is None else lambda own: seen(own.method),
        new=new,
        settle=None if plain.settle is None else settle,
        mail=("method", *plain.mail) if plain.mail else (),
    )


def within(plain: Server) -> dict[str, Any]:
    """Return the functions, besides `update`, of a server whose state holds that of another as `method`."""
    return {
        "down": lambda state, clock: plain.down(state.method, clock),
        "final": lambda state, clock: plain.last(state.method, clock),
        "finished": lambda state: plain.finished(state.method),
        "logged": lambda state: plain.logged(state.method),
    }


def check_averages(wrapper: str, method: Method, program: Program, server: Server) -> None:
    """Refuse a server whose state is not the global params."""
    expected = program.start()[0].keys()
    if isinstance(server.state, dict) and server.state.keys() == expected and expected:
        return
    raise ProgramError(
        f"{wrapper} needs a method whose server averages its clients' copies of the global params, "
        f"and '{method.name}' does not: wrap another method, such as fedavg"
    )


def averaging_server_of(
    wrapper: str, method: Method, change: Callable[[Server], Server] = lambda plain: plain
) -> Callable[[Program], Server]:
    """Return what makes a wrapper's server of the method's, refusing one that does more than average."""

    def server(program: Program) -> Server:
        plain = method.server(program)
        check_averages(wrapper, method, program, plain)
        return change(plain)

    return server


def check_takes_means(wrapper: str, method: Method, program: Program, server: Server) -> None:
    """Refuse a server that needs more than means of copies, or of fedsvi's gradients."""
    if method.everyone or method.discloses != "sums":
        alone = "uses what each client sends individually"
        why = "sums what all clients know" if method.everyone else alone
        raise ProgramError(
            f"{wrapper} changes a mean over clients, and {method.name} {why}: wrap fedsvi or fedavg"
        )
    if "gradients" not in method.traits:
        check_averages(wrapper, method, program, server)
