"""The choice of a method for a model where no rows are: the server chooses, and nodes make the same by its recipe."""

from __future__ import annotations

from typing import Any, NamedTuple

from hierfl.engine.settings import Settings
from hierfl.method import Method
from hierfl.nodes.agreement import Agreement, Fills
from hierfl.nodes.call import FitCall
from hierfl.nodes.messages import Refused
from hierfl.program.program import Program
from hierfl.program.public_names import CannotRemake
from hierfl.program.recipes import remake
from hierfl.program.sites import Model
from hierfl.runs.choice import Choice, choose

ROUNDS = 200  # of a chosen method that does not stop itself, as the first attempt of `hierfl.fit`


class ReadAlone(NamedTuple):
    """A program that a server has read without rows, and the two values that stand in for theirs."""

    program: Program
    fills: Fills


class Decided(NamedTuple):
    """What a server runs: the method, rounds (None: until it stops itself) and why it was chosen (None: named)."""

    method: Method
    rounds: int | None
    why: str | None = None
    read: ReadAlone | None = None


def chosen(model: Model, call: FitCall, agreement: Agreement) -> tuple[Choice, Fills]:
    """Choose a method by the rule of `hierfl.fit`; return also the values that stood in for rows."""
    # nodes may be missing from a round
    settings = Settings(disclose=call.disclose, on_client_error="skip")
    how: Any = {"settings": settings, "cohort": call.cohort, "seed": call.seed}
    return agreement.tried(
        lambda data: choose(model, data, agreed=agreement.agreed, **how),
        "no method can be chosen without rows ({}): name one, hierfl.methods.two_stage(model) for example",
    )


def made_by(recipe: Any, model: Model) -> Method:
    """Return the method of a server's recipe, which need not be trusted, for the node's own model."""
    try:
        found = remake(recipe, handed={"model": model})
    except CannotRemake as error:
        raise Refused(f"the server's method cannot be made here: {error}") from error
    if not isinstance(found, Method):
        raise Refused(f"the server names a {type(found).__name__} as the method")
    return found


def at_node(call: FitCall, recipe: Any) -> Method:
    """Return the method of a call at a node: the named one, or that of the server's recipe."""
    return call.method if isinstance(call.method, Method) else made_by(recipe, call.method)


def decided(call: FitCall, agreement: Agreement) -> Decided:
    """Return what the server of a call runs."""
    if isinstance(call.method, Method):
        return Decided(call.method, call.rounds)
    found, fills = chosen(call.method, call, agreement)
    endless = call.rounds is None and found.method.most_rounds is None
    read = None if found.program is None else ReadAlone(found.program, fills)
    return Decided(found.method, ROUNDS if endless else call.rounds, found.why, read)
