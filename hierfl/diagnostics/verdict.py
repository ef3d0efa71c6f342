"""Whether a fit is to be trusted: one verdict, and where it is not good, the mend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hierfl.core.importance_sampling import K_HAT
from hierfl.core.trees import named_leaves
from hierfl.data.absent import RowsNotSaved
from hierfl.diagnostics.convergence import convergence
from hierfl.diagnostics.local_integrals import unseen_error
from hierfl.engine.client_store import taken
from hierfl.engine.conflicts import CONFLICTS
from hierfl.engine.rounds import records_of
from hierfl.posterior.site_table import SiteTable
from hierfl.posterior.snapshot import Snapshot
from hierfl.posterior.without_rows import lacks_rows

FEWEST = 100  # effective draws, of those that a method has weighted itself
WORK = 1e8  # rows x unknowns above which only the history is judged: a gradient for each draw would take minutes
AT_ONCE = 4096  # clients whose states are looked at together


class Verdict(NamedTuple):
    """Whether to trust a fit; None: that cannot be told. In words: why, and the mend."""

    trustworthy: bool | None
    words: str


@dataclass(frozen=True)
class _Skipped:
    """A client that was left out of rounds."""

    client: str
    rounds: tuple[int, ...]
    reason: str


def verdict(fit: Snapshot, table: SiteTable, *, seed: int = 0) -> Verdict:
    """Judge a fit by its history, its draws, and `hierfl.diagnostics.convergence`.

    Args:
        fit: a run at some round.
        table: of its sites.
        seed: of the draws that `convergence` takes.
    """
    if table.not_finite:
        mend = "Lower the step size" if fit.federation.rates else "Scale the rows"
        return Verdict(
            False,
            f"Not trustworthy: draws of {_named(table.not_finite)} are not finite. {mend}, and fit again.",
        )
    known = of_history(fit)
    if known is not None and known.trustworthy is False:
        return known
    derived = fit.program.derived
    points = [site for site in table.points if site not in derived]
    if not [site for site in table.spread if site not in derived]:
        return _of_points(fit, seed)
    found = known or _never_seen(fit) or _converged(fit, seed)
    if points and found.trustworthy is not False:
        are = "is a point estimate" if len(points) == 1 else "are point estimates"
        return Verdict(
            False,
            f"Not trustworthy: {_named(points)} {are}, and the intervals of the others leave out that "
            f"uncertainty. Give the model a prior there, and take a guide that spreads (guides.structured).",
        )
    return found


def of_history(fit: Snapshot) -> Verdict | None:
    """Return what the history alone tells, which costs nothing; None where it tells nothing."""
    rounds, server = len(fit.progress.history), fit.federation.server
    skipped = _skipped(fit)
    lasting = [one for one in skipped if rounds - 1 in one.rounds or 2 * len(one.rounds) > rounds]
    if lasting:
        first = lasting[0]
        more = f", and {len(lasting) - 1} more" if len(lasting) > 1 else ""
        return Verdict(
            False,
            f"Not trustworthy: client '{first.client}' was left out of {len(first.rounds)} of {rounds} rounds "
            f"({first.reason}){more}. Mend its rows, or fit without it (data.select), and fit again.",
        )
    stops = server.stops_itself
    if stops and not server.finished(fit.progress.server):
        return Verdict(
            False,
            f"Not trustworthy: the run ended after {rounds} rounds, before {fit.method.name} was done. Allow more "
            f"rounds.",
        )
    return _of_weights(fit)


def _of_weights(fit: Snapshot) -> Verdict | None:
    """Judge a method that has weighted its own draws; None where it has not."""
    weighed = [record for record in fit.progress.history if "k_hat" in record]
    if not weighed:
        return None
    k_hat, effective = float(weighed[-1]["k_hat"]), weighed[-1].get("effective")
    facts = f"k-hat is {k_hat:.2f}"
    if effective is not None:
        facts += f", {float(effective):,.0f} draws are effective"
    if k_hat >= K_HAT:
        return Verdict(
            False,
            f"Not trustworthy: {facts}, and weights cannot make up for what the approximation misses from "
            f"{K_HAT} on. Allow more rounds, or fit methods.fedsvi(model, guide=guides.structured) for longer.",
        )
    if effective is not None and float(effective) < FEWEST:
        return Verdict(
            False,
            f"Not trustworthy: {facts}, fewer than {FEWEST}. Allow more rounds, or more draws.",
        )
    conflicts = list(records_of(fit.progress.history, CONFLICTS))
    if conflicts:
        return Verdict(
            None,
            f"Trustworthy as far as weights tell: {facts}. But {_named(conflicts)} conflicts with all other clients "
            f"(history['conflicts']), and is counted. See whether its rows are right.",
        )
    unseen = unseen_error(fit)
    if unseen:
        return Verdict(None, f"Trustworthy as far as weights tell: {facts}. {unseen}")
    return Verdict(True, f"Trustworthy: the weighted draws are right ({facts}).")


def _of_points(fit: Snapshot, seed: int) -> Verdict:
    """Judge a fit whose every number is a point estimate."""
    found = _converged(fit, seed)
    words = (
        "Not trustworthy as a posterior: these are point estimates, without sd or interval. For intervals fit "
        "methods.fedsvi(model)."
    )
    return Verdict(False, f"{words}\n{found.words}" if found.trustworthy is False else words)


def _converged(fit: Snapshot, seed: int) -> Verdict:
    """Return the verdict of `convergence`, by the history alone where its draws would take minutes."""
    program = fit.program
    size = program.latents.global_block.size + program.latents.local_block.size
    many = size * fit.federation.data.num_rows > WORK or lacks_rows(fit)
    try:
        found = convergence(fit, draws=0, seed=seed) if many else convergence(fit, seed=seed)
    except (ValueError, RowsNotSaved) as error:
        return Verdict(
            None,
            f"Whether to trust this fit is not known: {error}. Fit for more rounds, or compare with NUTS, "
            f"diagnostics.against_nuts(fit), where rows may be pooled.",
        )
    lead = "Trustworthy as far as the run tells" if found.converged else "Not trustworthy"
    return Verdict(found.converged, f"{lead}. {found.verdict}")


def _never_seen(fit: Snapshot) -> Verdict | None:
    """Refuse to trust a fit in which the states of some clients, not of all, are still those before the first round."""
    start = named_leaves(fit.federation.client.own)
    count = len(fit.clients)
    if not start:
        return None
    same = torch.ones(count, dtype=torch.bool)
    for ids in torch.arange(count).split(AT_ONCE):
        for name, leaf in named_leaves(taken(fit.progress.table, ids)).items():
            same[ids] &= (leaf == start[name]).reshape(len(ids), -1).all(1)
    unseen = [fit.clients[i] for i in same.nonzero()[:, 0].tolist()]
    if not unseen or len(unseen) == count:
        return None
    return Verdict(
        False,
        f"Not trustworthy: {len(unseen)} of {count} clients ({_named(unseen)}) have never taken part, and their "
        f"local sites are as they began. Run more rounds, or give more clients a round (cohort=).",
    )


def _skipped(fit: Snapshot) -> list[_Skipped]:
    """Return the clients that were left out of rounds."""
    return [
        _Skipped(client, tuple(number for number, _ in times), str(times[0][1]["reason"]))
        for client, times in records_of(fit.progress.history, "left_out").items()
    ]


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
