"""`hierfl.nodes.fit`: fit a method or a model over nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from hierfl.core.arguments import spelled
from hierfl.engine.settings import Disclose
from hierfl.method import Method
from hierfl.nodes.call import FitCall
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.program.sites import Model


class OverNodes(Protocol):
    """Nodes that a method can be fitted over: `hierfl.flower.superlink(...)`, `hierfl.nodes.in_process(...)`."""

    def fit_over(self, call: FitCall) -> FitOverNodes:
        """Fit the method of a call, or one that is chosen for its model."""
        ...


@spelled
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
