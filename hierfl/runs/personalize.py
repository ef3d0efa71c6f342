"""New clients: their states are inferred from their own rows, with the global params fixed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from hierfl.core.arguments import expect_count
from hierfl.core.process import one_at_a_time
from hierfl.core.trees import tree_leaves
from hierfl.data.batch import full_batch
from hierfl.data.clients import ClientData
from hierfl.engine.client_store import subset
from hierfl.engine.federation import Federation
from hierfl.engine.rounds import Progress, adapt
from hierfl.posterior.snapshot import Snapshot, check_rows

if TYPE_CHECKING:
    from hierfl.formulas.formula import Frames

F = TypeVar("F", bound=Snapshot)  # `hierfl.Fit`, whose module imports this one


def personalize(
    fit: F, data: ClientData | Frames, *, rounds: int = 200, from_scratch: bool = True
) -> F:
    """Infer the local sites of new clients, global params fixed; return a Fit of those clients.

    Args:
        fit: of other clients.
        data: the new clients' rows; unlabeled where the guide needs no labels.
        rounds: rounds of the clients' own steps; none where the method keeps no client state,
            and one by two_stage, which needs no more.
        from_scratch: all start as new clients; False: all are clients of this fit, and go on
            from their states, as for `methods.fine_tuned`.

    Raises:
        ValueError: a field is missing or holds NaN, or labels that the guide reads are missing;
            or `from_scratch` is False, and a client is new.
    """
    of: Any = fit
    rows = of._rows(data, matched=False)
    federation, progress = personalized(fit, rows, rounds, from_scratch=from_scratch)
    return cast(F, replace(of, federation=federation, progress=progress))


@one_at_a_time
def personalized(
    fit: Snapshot, data: ClientData, rounds: int, *, from_scratch: bool = True
) -> tuple[Federation, Progress]:
    """Infer client states, global params fixed, `from_scratch` as new or from their states in the fit."""
    rounds = expect_count(rounds, "rounds", least=0)
    check_rows(fit, data, fit.program.reads.model | fit.program.reads.guide)
    federation = replace(fit.federation, data=data)
    _check_labels(fit, federation)
    start = None
    if not from_scratch:
        fitted = set(fit.federation.data.names)
        if new := [name for name in data.names if name not in fitted]:
            raise ValueError(
                f"client '{new[0]}' is new, and has no state to go on from: take from_scratch=True"
            )
        start = subset(fit.progress.table, fit.federation.data.index(data.names))
    table = adapt(federation, fit.progress.server, rounds, start)
    # weights of these clients alone would leave the fitted ones out of the posterior
    return federation, replace(fit.progress, table=table, corrected=False)


def _check_labels(fit: Snapshot, federation: Federation) -> None:
    """Refuse unlabeled new clients where their client states or their guide depend on labels."""
    fields = {**federation.data.fields, **federation.data.client_fields}
    missing = [name for name in fit.program.labels.values() if name not in fields]
    if not missing:
        return
    own = federation.client.own
    try:
        if not tree_leaves(own):
            params = federation.client.params(fit.message, own)
            fit.program.draw(params, full_batch(federation.data, torch.tensor([0])))
            return
        error_of_labels: Exception | None = None
    except (AttributeError, RuntimeError, ValueError) as error:
        error_of_labels = error
    raise ValueError(
        f"new clients are inferred from their labels, and the rows have no field '{missing[0]}': "
        "give it, or fit with a guide that does without, guides.amortized(fields=...); before any "
        "label, predict_from_prior(fit, rows)"
    ) from error_of_labels
