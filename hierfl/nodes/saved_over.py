"""A fit over nodes on disk: the server's state, and by which name its run is known at the nodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hierfl.core.arguments import expect_path
from hierfl.data.absent import form_of, rows_absent, stand_in
from hierfl.engine.federation import Federation
from hierfl.nodes.agreement import FEW
from hierfl.runs import checkpoint as state
from hierfl.runs import saved
from hierfl.runs.records import about
from hierfl.runs.run_folder import NODES, checkpoints, held


def save(fit: Any, folder: str | Path) -> None:
    """Write what the server has to a folder, for `hierfl.nodes.load(folder, nodes)`.

    Only the owner can read its files. No row and no state of a client is in it.

    Args:
        fit: over nodes.
        folder: made if it does not exist.

    Raises:
        CheckpointError: the folder holds another run, or this one after more rounds.
    """
    root = expect_path(folder, "folder", "run")
    who = about(fit.method, few_of(fit.federation), fit.rounds)
    with held(root):
        saved.check_may_write(root, who, fit.progress.round)
        state.save(root, fit.progress, who, beside=beside(fit))


def beside(fit: Any) -> dict[str, Any]:
    """Return the files of a saved fit over nodes beside its state."""
    joined = {client: run for client, run in fit.joined.items() if client in fit.clients}
    said = json.dumps({"run": fit.run, "joined": joined}).encode()
    return {**saved.beside(fit.federation, with_data=False), NODES: said}


def beside_again(folder: Path, fit: Any) -> dict[str, Any] | None:
    """Return these files where a folder holds them of the fit that another takes the place of."""
    return beside(fit) if any((path / NODES).exists() for path in checkpoints(folder)) else None


def few_of(federation: Federation) -> Federation:
    """Return a federation of a few made-up rows a client, by which a run over nodes is known."""
    data = federation.data
    fills = next(iter(data.fields.values())).fills  # type: ignore[attr-defined]
    counts = [min(FEW, count) for count in data.counts.tolist()]
    return replace(
        federation, data=stand_in(rows_absent(data.names, counts, form_of(data), fills), 0)
    )
