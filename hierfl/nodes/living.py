"""A fit over nodes on disk, and as clients leave and join it: what a client had sent is deleted at the server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hierfl.core.arguments import expect_path
from hierfl.engine.client_store import CheckpointError
from hierfl.formulas.formula import Formula
from hierfl.nodes.agreement import few_made_up
from hierfl.nodes.choosing import FitCall
from hierfl.nodes.messages import COUNTED, last_counted
from hierfl.runs import checkpoint as state
from hierfl.runs import saved
from hierfl.runs.living import leaving, left_by, restricted_to, rewritten
from hierfl.runs.records import about
from hierfl.runs.run_folder import NODES, checkpoints, held

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
    _check_held(folder, fit)
    counted = last_counted(old, fit.progress.history)
    new = restricted_to(old, out)
    where = left_by(old, fit.progress, new, out)
    # nodes are asked to go on from the state of the round in which they were last counted
    stay = [{"client": name, "round": counted[name]} for name in new.data.names if name in counted]
    where = replace(where, history=(*where.history[:-1], {**where.history[-1], COUNTED: stay}))
    made = replace(fit, federation=new, progress=where, ended=frozenset())
    if folder is not None:
        _rewrite(Path(folder), fit, made)
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
        TooFewNodes: fewer new nodes than their `fewest` take part; others are left out, with a warning.
        CheckpointError: the folder does not hold this run.
    """
    _check_held(folder, fit)
    of_frames = fit.chosen is not None and isinstance(fit.method.model, Formula)
    model: Any = fit.method.model if of_frames else fit.method
    call = FitCall(model, seed=fit.federation.seed, joins=fit)
    made = nodes.reached(call).fit_over(call)
    if folder is not None:
        _rewrite(Path(folder), fit, made)
    return made


def forget(ask: Any, client: str) -> None:
    """Remove what a transport keeps of a client's answers, where it keeps any."""
    getattr(ask, "forget", lambda client: None)(client)


def save(fit: Fitted, folder: str | Path) -> None:
    """Write what the server has to a folder, for `hierfl.nodes.load(folder, nodes)`.

    Only the owner can read its files. No row and no state of a client is in it.

    Args:
        fit: over nodes.
        folder: made if it does not exist.

    Raises:
        CheckpointError: the folder holds another run, or this one after more rounds.
    """
    root = expect_path(folder, "folder", "run")
    with held(root):
        saved.check_may_write(root, _about(fit), fit.progress.round)
        state.save(root, fit.progress, _about(fit), beside=_beside(fit))


def _about(fit: Fitted) -> dict[str, Any]:
    """Return what identifies a run on disk: a few made-up rows a client stand in for its own."""
    few = replace(fit.federation, data=few_made_up(fit.federation.data))
    return about(fit.method, few, fit.rounds)


def _check_held(folder: str | Path | None, fit: Fitted) -> None:
    """Refuse a folder that does not hold a run."""
    if folder is None or any(state.is_of_run(p, _about(fit)) for p in checkpoints(Path(folder))):
        return
    raise CheckpointError(f"'{folder}' does not hold this run: name its checkpoint folder")


def _beside(fit: Fitted) -> dict[str, Any]:
    """Return the files of a saved fit over nodes beside its state."""
    joined = {client: run for client, run in fit.joined.items() if client in fit.clients}
    names = json.dumps({"run": fit.run, "joined": joined}).encode()
    return {**saved.beside(fit.federation, with_data=False), NODES: names}


def _rewrite(folder: Path, old: Fitted, new: Fitted) -> None:
    """Let a fit take the place of another in a folder, with its files where the folder has them."""
    saves = any((path / NODES).exists() for path in checkpoints(folder))
    with held(folder):
        rewritten(folder, _about(old), new.progress, _about(new), _beside(new) if saves else None)
