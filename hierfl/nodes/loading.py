"""Read a fit over nodes that was saved, and ask its nodes again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hierfl.core.arguments import spelled
from hierfl.engine.client_store import CheckpointError
from hierfl.method import Method
from hierfl.nodes.asking import Ask
from hierfl.nodes.call import FitCall
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.program.sites import Family, Guide, Model
from hierfl.runs import checkpoint as state
from hierfl.runs import load as of_fits
from hierfl.runs import saved
from hierfl.runs.records import read_json
from hierfl.runs.run_folder import NODES, checkpoints


@spelled
def load(
    folder: str | Path,
    nodes: Any = None,
    *,
    method: Method | None = None,
    model: Model | None = None,
    guide: Guide | Family | None = None,
) -> FitOverNodes:
    """Read a fit that `FitOverNodes.save` has written.

    Args:
        folder: of the fit.
        nodes: those of the fit, as for `hierfl.nodes.fit`, to ask about their clients. Default None:
            the fit answers what the server has.
        method: as in `hierfl.load`.
        model: as in `hierfl.load`.
        guide: as in `hierfl.load`.

    Raises:
        CheckpointError: the folder holds no undamaged fit over nodes.
        CannotRemake: the method cannot be built again, or the model or guide is another one.
        TooFewNodes: no node introduces a client of the fit.
    """
    fit = of_fits.load(folder, method=method, model=model, guide=guide)
    newest, record = saved.newest_record(checkpoints(Path(folder)))
    if NODES not in record.hashes or not state.is_whole(newest / NODES, record.hashes[NODES]):
        raise CheckpointError(f"'{folder}' holds no fit over nodes: read it by hierfl.load")
    said = read_json(newest / NODES)
    joined = said.get("joined") if isinstance(said, dict) else None
    if not isinstance(joined, dict) or not isinstance(said["run"], str):
        raise CheckpointError(f"'{newest / NODES}' is not of hierfl: copy the folder again")
    made = FitOverNodes(
        fit.method, fit.federation, fit.progress, fit.rounds, said["run"], _nobody, joined
    )
    return made if nodes is None else replace(made, ask=_asking(made, nodes))


def _nobody(contents: Any) -> Any:
    raise ValueError(
        "the fit was loaded without its nodes, of which this is asked: hierfl.nodes.load(folder, nodes)"
    )


def _asking(fit: FitOverNodes, nodes: Any) -> Ask:
    """Return how the nodes of a loaded fit are asked, whose clients introduce themselves."""
    model: Any = fit.method if fit.chosen is None else fit.method.model
    ask: Ask = nodes.asking(FitCall(model), fit.clients)
    return ask
