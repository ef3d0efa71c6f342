"""`fit` where the rows are at nodes, and what it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hierfl.core.arguments import spelled_or
from hierfl.engine.settings import Disclose
from hierfl.method import Method
from hierfl.program.sites import Model
from hierfl.runs.call import NOT_OF_FITS, check_count, check_method

if TYPE_CHECKING:
    from hierfl.nodes.fit_over_nodes import FitOverNodes

# argument of `hierfl.fit` -> what to do instead
ELSEWHERE = {
    "data": "the rows are at the nodes: leave data out",
    "validation": "the rows are at the nodes: ask them afterwards, fit.scores()",
    "eval_every": "nothing is scored between rounds: ask the nodes afterwards, fit.scores()",
    "patience": "nothing is scored between rounds: give the number of rounds",
    "checkpoint_every": "a checkpoint is written after each round: leave checkpoint_every out",
    "progress": "there is no bar over nodes: read fit.history afterwards",
    "callback": "there is no fit with rows between rounds: leave callback out",
    "settings": "each node is one client, computed where its owner says: leave settings out",
    "engine": "each node is one client: leave engine out",
    "chunk": "each node is one client: leave chunk out",
    "compile": "nodes run their steps uncompiled: leave compile out",
    "device": "a node computes where its owner says: leave device out",
    "on_client_error": "a node that fails is left out, and named: leave on_client_error out",
    "min_rows": "a node's policy says it: min_rows in its policy.toml",
    **NOT_OF_FITS,
}


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
    joins: FitOverNodes | None = None  # the fit that the clients of the nodes join

    def __post_init__(self) -> None:
        """Refuse arguments of another kind, and a method that discloses more than the server may see."""
        check_method(self.method)
        for name in ("rounds", "seed", "cohort"):
            check_count(name, getattr(self, name))
        if self.disclose not in ("summaries", "sums"):
            raise ValueError(f"disclose is {self.disclose!r}: it must be 'summaries' or 'sums'")
        if self.named and self.disclose == "sums" and self.named.discloses == "summaries":
            raise ValueError(
                f"disclose is 'sums', and method '{self.named.name}' shows the server a summary of "
                "each client: take another, or hand in the model, for which one is chosen"
            )
        if self.resume and self.checkpoint is None:
            raise ValueError(
                "resume is True, and there is no checkpoint to go on from: name its folder"
            )

    @property
    def lacks_schema(self) -> bool:
        """Whether the model is a `hierfl.formula` on whose schema the nodes are still to agree."""
        return getattr(self.method, "has_schema", True) is False

    @property
    def named(self) -> Method | None:
        """The method, where one was named; None where one is to be chosen for a model."""
        return self.method if isinstance(self.method, Method) else None


class OverNodes(Protocol):
    """Nodes that a method can be fitted over: `hierfl.flower.superlink(...)`, `hierfl.nodes.in_process(...)`."""

    def fit_over(self, call: FitCall) -> FitOverNodes:
        """Fit the method of a call, or one that is chosen for its model."""
        ...


@spelled_or(ELSEWHERE)
def fit(
    model: Method | Model,
    nodes: OverNodes,
    *,
    rounds: int | None = None,
    seed: int = 0,
    cohort: int | float | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    disclose: Disclose = "summaries",
) -> FitOverNodes:
    """Fit a model, or a method, to clients whose rows are on machines of their own.

    Draws of the global sites are here; nodes are asked for summaries, draws and predictions of
    their clients.

    Args:
        model: a function of a `ClientBatch`, or a `hierfl.formula`: its method is chosen by the
            rule of `hierfl.fit`, from what the nodes agree on. Without a schema, nodes first agree
            on one. Or a method. A chosen method that does not stop itself runs for 200 rounds,
            and whether that is enough is not judged.
        nodes: `hierfl.flower.superlink(...)`, a SuperLink whose SuperNodes are asked; or
            `hierfl.nodes.in_process(...)`, to try it in this process.
        rounds: as in `hierfl.fit`.
        seed: of everything random.
        cohort: clients a round: None for all, a count, or a share in (0, 1].
        checkpoint: folder to write a checkpoint to after each round.
        resume: continue from the newest undamaged checkpoint of that folder, if there is one.
        disclose: what the server may see: "summaries" of each client, or only "sums" over clients.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: as `hierfl.fit`; or the program cannot be read without rows.
        ProgramError: a model or guide that cannot be run as it is written.
        Forbidden: no node's policy allows the run (`in_process`).
        TooFewNodes: of a round, or before the first one.
    """
    if not callable(getattr(nodes, "fit_over", None)):
        raise TypeError(
            f"nodes is a {type(nodes).__name__}: make it with hierfl.flower.superlink(...), or "
            "with hierfl.nodes.in_process(...) to try it here"
        )
    return nodes.fit_over(FitCall(model, rounds, seed, cohort, disclose, checkpoint, resume))
