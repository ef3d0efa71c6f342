"""What `fit` is asked for where the rows are at nodes, and the method: the server chooses, nodes make the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

from hierfl.core.arguments import expect
from hierfl.engine.federation import Disclose, Settings
from hierfl.method import Method
from hierfl.nodes.agreement import Agreement, Fills
from hierfl.nodes.messages import Refused
from hierfl.program.program import Program
from hierfl.program.public_names import CannotRemake
from hierfl.program.recipes import remake
from hierfl.program.sites import Model
from hierfl.runs.call import check_count, check_method
from hierfl.runs.choice import choose

ROUNDS = 200  # of a chosen method that does not stop itself, as the first attempt of `hierfl.fit`


@dataclass(frozen=True, eq=False)
class FitCall:
    """The arguments of `fit` without the nodes, by its names; `method` is the method or the model."""

    method: Method | Model
    rounds: int | None = None
    seed: int = 0
    cohort: int | float | None = None
    disclose: Disclose = "summaries"
    checkpoint: str | Path | None = None
    resume: bool = False
    joins: Any = None  # the FitOverNodes that the clients of the nodes join

    def __post_init__(self) -> None:
        check_method(self.method)
        for name in ("rounds", "seed", "cohort"):
            check_count(name, getattr(self, name))
        discloses = self.method.discloses if isinstance(self.method, Method) else "sums"
        expect(disclose=(self.disclose, get_args(Disclose)))
        if (self.disclose, discloses) == ("sums", "summaries"):
            raise ValueError(
                f"disclose is 'sums', and method '{self.method.name}' shows the server a summary of "  # type: ignore[union-attr]
                "each client: use another, or hand in the model, for which one is chosen"
            )
        if self.resume and self.checkpoint is None:
            raise ValueError(
                "resume is True, and there is no checkpoint to continue from: name its folder"
            )

    @property
    def lacks_schema(self) -> bool:
        """Whether the model is a `hierfl.formula` on whose schema the nodes are still to agree."""
        return getattr(self.method, "has_schema", True) is False

    @property
    def model(self) -> Model:
        """The model, of the method too."""
        return self.method.model if isinstance(self.method, Method) else self.method

    def made_by(self, recipe: Any) -> Method:
        """Return the method at a node: the named one, or that of a server's recipe, which need not be trusted."""
        if isinstance(self.method, Method):
            return self.method
        try:
            method = remake(recipe, handed={"model": self.method})
        except CannotRemake as error:
            raise Refused(f"the server's method cannot be made here: {error}") from error
        if not isinstance(method, Method):
            raise Refused(f"the server names a {type(method).__name__} as the method")
        return method


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


def decided(call: FitCall, agreement: Agreement) -> Decided:
    """Return what the server of a call runs: the named method, or the one that the rule of `hierfl.fit` chooses."""
    if isinstance(model := call.method, Method):
        return Decided(model, call.rounds)
    # nodes may be missing from a round
    settings = Settings(disclose=call.disclose, on_client_error="skip")
    how: Any = {"settings": settings, "cohort": call.cohort, "seed": call.seed}
    choice, fills = agreement.tried(
        lambda data: choose(model, data, agreed=agreement.agreed, **how),
        "no method can be chosen without rows ({}): name one, hierfl.methods.two_stage(model) for example",
    )
    endless = call.rounds is None and choice.method.most_rounds is None
    read = None if choice.program is None else ReadAlone(choice.program, fills)
    return Decided(choice.method, ROUNDS if endless else call.rounds, choice.why, read)
