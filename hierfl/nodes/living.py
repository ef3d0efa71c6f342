"""A client leaves a fit over nodes, and what it had sent is deleted at the server; or others join it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hierfl.engine.client_store import CheckpointError
from hierfl.formulas.formula import Formula
from hierfl.nodes.asking import COUNTED, Ask, last_counted
from hierfl.nodes.call import FitCall
from hierfl.nodes.saved_over import beside_again, few_of
from hierfl.runs import checkpoint as state
from hierfl.runs.living import leaving, left_by, restricted_to, rewritten
from hierfl.runs.records import about
from hierfl.runs.run_folder import checkpoints, held

Fitted = Any  # a FitOverNodes, whose module imports this one


def without(fit: Fitted, client: str, *, folder: str | Path | None = None) -> Fitted:
    """Return the fit without one of its clients, as `hierfl.Fit.without` does; no node is asked.

    Its node keeps its own folder. The others are asked about their clients as before.

    Args:
        fit: over nodes.
        client: its name.
        folder: the run's checkpoint folder, in which nothing that the client had sent is left,
            nor in that of `by_files`; `withdrawn.json` is the certificates. Backups, and what
            another transport keeps, are not reached. None: it stays.

    Errors are those of `hierfl.Fit.without`.
    """
    old = fit.federation
    out = leaving(old, client)
    root = None if folder is None else Path(folder)
    who = None if root is None else holds(root, fit)
    counted = last_counted(old, fit.progress.history)
    new = restricted_to(old, out)
    where = left_by(old, fit.progress, new, out)
    # nodes are asked to go on from the state of the round in which they were last counted
    stay = [{"client": name, "round": counted[name]} for name in new.data.names if name in counted]
    where = replace(where, history=(*where.history[:-1], {**where.history[-1], COUNTED: stay}))
    made = replace(fit, federation=new, progress=where, ended=frozenset())
    if root is not None and who is not None:
        files = beside_again(root, made)
        with held(root):
            rewritten(root, who, where, about(fit.method, few_of(new), fit.rounds), files)
        forget(fit.ask, client)
    return made


def updated(fit: Fitted, nodes: Any, *, folder: str | Path | None = None) -> Fitted:
    """Return the fit with the clients of other nodes, or new rows of some, as `hierfl.Fit.updated`.

    The new nodes alone are asked: for a factor, and for log ratios. Afterwards they are asked
    about their clients as the others are.

    Args:
        fit: over nodes.
        nodes: those of the new or changed clients, as for `hierfl.nodes.fit`; a new node of a
            formula is started with the agreed schema, `fit.method.model`.
        folder: the run's checkpoint folder, in which the fit with the new clients takes the
            place of this one. None: it stays as it is.

    Raises:
        ValueError: as `hierfl.Fit.updated`; or rows of another form.
        AnotherRound: the others have to be asked, by a run over all nodes.
        TooFewNodes: a new node does not answer.
        CheckpointError: the folder does not hold this run.
    """
    root = None if folder is None else Path(folder)
    if root is not None:
        holds(root, fit)
    of_frames = fit.chosen is not None and isinstance(fit.method.model, Formula)
    model: Any = fit.method.model if of_frames else fit.method
    found = nodes.fit_over(FitCall(model, seed=fit.federation.seed, joins=fit))
    if root is not None:
        files = beside_again(root, found)
        with held(root):
            old, new = (
                about(one.method, few_of(one.federation), one.rounds) for one in (fit, found)
            )
            rewritten(root, old, found.progress, new, files)
    return found


def forget(ask: Ask, client: str) -> None:
    """Remove what a transport keeps of a client's answers, where it keeps any."""
    if of := getattr(ask, "forget", None):
        of(client)


def holds(folder: Path, fit: Fitted) -> dict[str, Any]:
    """Return what identifies a run on disk; refuse a folder that does not hold it."""
    who = about(fit.method, few_of(fit.federation), fit.rounds)
    if not any(state.is_of_run(path, who) for path in checkpoints(folder)):
        raise CheckpointError(f"'{folder}' does not hold this run: name its checkpoint folder")
    return who
