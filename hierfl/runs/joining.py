"""Clients join a fit: global params stay fixed, or two_stage asks them alone, and others where k-hat says so."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from hierfl.core.arguments import expect_count
from hierfl.core.process import one_at_a_time
from hierfl.core.trees import Tree, tree_leaves
from hierfl.core.user_warnings import warn
from hierfl.data.absent import RowsNotSaved, is_absent
from hierfl.data.batch import full_batch
from hierfl.data.clients import ClientData
from hierfl.data.consistency import offsets_of
from hierfl.engine.client_store import new_table, put, subset, taken
from hierfl.engine.federation import Federation, federate
from hierfl.engine.rounds import Progress, adapt, one_round
from hierfl.engine.rounds import rounds as run_rounds
from hierfl.methods.stages.joined import carried, joined
from hierfl.methods.stages.kept import Kept, rounds_of
from hierfl.posterior.snapshot import Snapshot, check_rows
from hierfl.program.check_dependence import check_labels_given
from hierfl.runs.saved import HAND_IN, Fitted

if TYPE_CHECKING:
    from hierfl.formulas.formula import Frames


F = TypeVar("F", bound=Snapshot)  # `hierfl.Fit`, whose module imports this one


def personalize(
    fit: F, data: "ClientData | Frames", *, rounds: int = 200, from_scratch: bool = True
) -> F:
    """Infer the local sites of new clients, global params fixed; return a Fit of those clients.

    Args:
        fit: of other clients.
        data: the new clients' rows; unlabeled where the guide needs no labels.
        rounds: rounds of the clients' own steps. Methods without a client state take none, and
            two_stage takes one.
        from_scratch: all clients start as new ones. False: all are clients of this fit and continue
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
            what = f"client '{new[0]}' is new, and has no state to continue from"
            raise ValueError(f"{what}: use from_scratch=True")
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
    what = f"new clients are inferred from their labels, and the rows have no field '{missing[0]}'"
    fix = "give it, or use guides.amortized(fields=...); without labels, use predict_from_prior(fit, rows)"
    raise ValueError(f"{what}: {fix}") from error_of_labels


WHAT = "the posterior with new clients"


@one_at_a_time
def updated(fit: Fitted, rows: "ClientData | Frames", *, rounds: int | None = None) -> Fitted:
    """Return the fit with new clients, or new rows of some, from what two_stage has kept.

    The new clients send a factor, then log ratios at new draws. Those of the other clients are
    carried over as in `without`. If k-hat says that these do not suffice, the other clients are
    asked, and a warning says so.

    Args:
        fit: of two_stage.
        rows: all rows of each new or changed client.
        rounds: the most rounds; with 2, nobody but the new clients is asked. None: until it is
            done.

    Raises:
        ValueError: the fit is not of two_stage, is not done, or has row noise; or the rows are
            unusable.
        RowsNotSaved: the fit was loaded without its clients' rows.
    """
    rows = fit._rows(rows, matched=False)
    planned = fit.method.most_rounds if rounds is None else expect_count(rounds, "rounds")
    old = fit.federation
    _check(fit, rows)
    before = Kept(rounds_of(fit.method, old.program, WHAT), fit.progress.server)
    if before.rounds.gathers is not None:
        what = "each round spends a part of the rows' privacy budget, which this fit has spent"
        raise ValueError(f"{what}: fit again with all clients")
    stay = [name for name in old.data.names if name not in set(rows.names)]
    data = together(old.data.select(stay), rows) if stay else rows
    federation = federate(fit.method, data, seed=old.seed, settings=old.settings)
    if old.cohort < old.data.num_clients:
        federation = replace(federation, cohort=min(old.cohort, data.num_clients))
    after = rounds_of(fit.method, federation.program, WHAT)
    places = [places_of(of, stay) for of in (old, federation)]
    state = joined(before, after, *places)
    table = new_table(federation.client.own, data.num_clients)
    if stay:
        put(table, data.index(stay), taken(fit.progress.table, old.data.index(stay)))
    where = replace(fit.progress, server=state, table=table, compiled=False)
    ids, until = data.index(rows.names), where.round + planned
    where = one_round(federation, where, until, ids=ids)
    where = replace(where, server=carried(before, after, where.server, *places))
    all_weighted = bool(where.server.weighted[places[1]].all())
    if all_weighted and where.round < until and not federation.server.finished(where.server):
        where = one_round(federation, where, until, ids=ids)
    alone = where.round
    for done in run_rounds(federation, where, until):
        where = done
    _say(where, fit.progress.round, alone, len(stay))
    return replace(fit, federation=federation, progress=where, rounds=until)


def places_of(federation: Federation, names: Sequence[str]) -> Tensor:
    """Return the places of some clients at a server, which has them in the order of names."""
    if not names:
        return torch.zeros(0, dtype=torch.long)
    return federation.program.ranks[federation.data.index(names)]


def _check(fit: Fitted, rows: ClientData) -> None:
    if is_absent(fit.federation.data):
        raise RowsNotSaved(f"the rows of the other clients were not saved: {HAND_IN}")
    check_rows(fit, rows, fit.program.reads.model)
    fields = {**rows.fields, **rows.client_fields}
    for name in fit.program.labels.values():
        if name not in fields:
            raise ValueError(f"the rows have no field '{name}': new clients are fitted to labels")
    check_labels_given(fit.program, rows)


def together(clients: ClientData, other: ClientData) -> ClientData:
    """Return the clients of both, with the fields of the first."""

    def joint(a: Tree, b: Tree) -> dict[str, Any]:
        return {name: torch.cat([v, b[name].to(v.dtype)]) for name, v in a.items()}

    return replace(
        clients,
        fields=joint(clients.fields, other.fields),
        offsets=offsets_of(torch.cat([clients.counts, other.counts])),
        names=(*clients.names, *other.names),
        client_fields=joint(clients.client_fields, other.client_fields),
        frame_rows=None,
    )


def _say(where: Progress, first: int, alone: int, others: int) -> None:
    """Say that other clients were asked again, if they were."""
    if where.round > alone and others:
        k_hats = [record["k_hat"] for record in where.history[first:alone] if "k_hat" in record]
        why = "their log ratios could not be carried over"
        if k_hats:
            why = f"k-hat was {k_hats[-1]:.2f} with their stored factors"
        what = f"the {others} other clients were asked again, in {where.round - alone} rounds"
        warn(f"{what}: {why}")
