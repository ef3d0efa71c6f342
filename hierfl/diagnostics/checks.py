"""The checks that `fit.summary()` and `fit.report()` share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from hierfl.core.importance_sampling import K_HAT
from hierfl.diagnostics.check import FEW_ROWS, LITTLE, Check, answered, listed, number
from hierfl.diagnostics.checks_of_rounds import checks_of_rounds, clients_of_rounds
from hierfl.diagnostics.convergence import UNSEEN, Convergence
from hierfl.diagnostics.entries import OF_CLIENTS, Entries, checks_of_draws
from hierfl.diagnostics.local_draws import LocalDraws
from hierfl.diagnostics.symmetries import NO_SYMMETRY, Symmetries
from hierfl.engine.federation import step_sizes
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.sites import Family

if TYPE_CHECKING:
    from hierfl.program.row_runs import Structure

CONVERGED = "Has the run converged?"
UNCERTAINTY = "Does every parameter have an uncertainty?"
ROW_ERROR = 0.01  # nats of a row
OF_FACTORS = "from_factor"  # the guide of two_stage, which is not fitted


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the checks of a fit rest on (None: unknown); `points` have no spread, `k_hats` are by client.

    `mirrored` are symmetries of which draws show one side; `own` and `entries` are of local draws of a
    method that weights its own.
    """

    fit: Snapshot
    run: Convergence | str
    points: tuple[str, ...] | None
    spread: bool
    not_finite: tuple[str, ...]
    information: pd.DataFrame | None
    k_hats: pd.Series | None
    mirrored: Symmetries = NO_SYMMETRY
    own: LocalDraws | None = None
    entries: Entries | None = None


def checks_of_fit(evidence: Evidence) -> list[Check]:
    """Return the checks that need nothing but a fit, in the order of the report."""
    return [
        *checks_of_run(evidence.fit, evidence.run),
        *checks_of_rounds(evidence.fit),
        *clients_of_rounds(evidence.fit),
        *_posterior(evidence),
        *_rows(evidence),
    ]


def checks_of_run(fit: Snapshot, run: Convergence | str) -> Iterator[Check]:
    """Report the verdict of `convergence`, and the approximation that weights cannot see."""
    if isinstance(run, str):
        why = f"{run[0].upper()}{run[1:]}".removesuffix(".")
        yield Check(
            CONVERGED,
            "not asked",
            f"{why}. Fit for more rounds, or compare with NUTS, diagnostics.against_nuts(fit), "
            "where rows may be pooled.",
            "doubt",
        )
        return
    words = run.verdict.removesuffix(UNSEEN).rstrip()
    if run.answer == "cannot be judged":
        yield Check(CONVERGED, "not asked", words, "doubt")
        return
    yield answered(CONVERGED, not run.converged, words, "fatal")
    if run.converged:
        yield from checks_of_draws(fit)
    if run.converged and run.verdict.endswith(UNSEEN):
        yield Check("Do the weights account for every approximation?", "warning", UNSEEN, "doubt")


def _posterior(evidence: Evidence) -> Iterator[Check]:
    if evidence.not_finite:
        fix = "Lower the step size" if step_sizes(evidence.fit.method) else "Scale the rows"
        yield Check(
            "Are all draws finite?",
            "warning",
            f"Some draws of {listed(evidence.not_finite)} are not finite: no result that involves "
            f"them can be trusted. {fix}, and fit again.",
            "fatal",
        )
    if evidence.points is None:
        size = evidence.fit.program.latents.local_block.size
        yield Check(
            UNCERTAINTY,
            "not asked",
            "There are no posterior draws to examine: too few were requested, or the model is "
            f"too large to hold enough of them ({size:,} parameters per client).",
        )
        return
    fix = (
        "Give the model a prior there, and use a guide that has spread (guides.structured)"
        if evidence.spread
        else "For intervals, fit methods.fedsvi(model)"
    )
    yield answered(
        UNCERTAINTY,
        bool(evidence.points),
        f"Intervals do not include the uncertainty of point estimates: {listed(evidence.points)}. {fix}."
        if evidence.points
        else "Yes: no parameter of the model is a point estimate.",
        "fatal",
    )
    yield from _symmetries(evidence.mirrored)
    yield from _scales(evidence.fit, evidence.points)
    if evidence.fit.program.row_sites is not None:
        yield from _row_sites(evidence.fit, evidence.fit.program.row_sites)
    yield from _guides_of_clients(evidence)


def _symmetries(mirrored: Symmetries) -> Iterator[Check]:
    """Warn of modes that draws do not show, as others are their mirror images."""
    if mirrored.orders:
        yield Check(
            "Do the components have an order?",
            "warning",
            f"The posterior stays the same when components of {listed(mirrored.orders)} are "
            "exchanged, and these draws follow one order: they are right at most within it. Give "
            "the model an order, such as one mean and a positive difference (docs/recipes.md), or "
            "compare what does not depend on the order with NUTS, diagnostics.against_nuts(fit).",
            "doubt",
        )
    if mirrored.signs:
        yield Check(
            "Do the signs have a meaning?",
            "warning",
            f"The posterior stays the same when the sign of {listed(mirrored.signs)} changes, and these "
            "draws have one sign: they are right at most up to it. Give one site a positive prior, "
            "such as HalfNormal, or use only what does not depend on the sign.",
            "doubt",
        )


def _scales(fit: Snapshot, points: tuple[str, ...]) -> Iterator[Check]:
    """Warn of a mean-field guide if global scales, positive sites, are inferred."""
    scales = [
        s.name
        for s in fit.program.latents.global_block.sites
        if not _reaches_below_0(s.support) and s.name not in points
    ]
    if not scales:
        return
    guide = fit.method.guide
    family = guide.__name__ if isinstance(guide, Family) else None  # type: ignore[attr-defined]
    question = "Does the guide let the global scales depend on the clients' parameters?"
    if family is None:
        words = "The guide is user-defined: what it treats as independent cannot be read from it."
        yield Check(question, "not asked", words)
        return
    where = f"draws of {fit.method.name}" if family == OF_FACTORS else f"the guide ({family})"
    yield answered(
        question,
        family == "mean_field",
        "No: the mean-field guide treats all parameters as independent, so its intervals for "
        f"{listed(scales)} are usually too narrow. guides.structured and guides.conditional do "
        "not assume independence."
        if family == "mean_field"
        else f"Yes: in {where}, the clients' parameters depend on {listed(scales)}.",
    )


def _row_sites(fit: Snapshot, structure: "Structure") -> Iterator[Check]:
    """Report the error of integrals over continuous sites of rows."""
    if not structure.terms:
        return
    from hierfl.posterior.eliminated import error_of_rows  # few programs need it

    question = f"Is the integral over {listed(structure.sites)}, sites of a row, accurate?"
    try:
        error = error_of_rows(fit)
    except ValueError as why:
        yield Check(question, "not asked", f"{why}".capitalize(), "note")
        return
    yield answered(
        question,
        error > ROW_ERROR,
        f"At posterior draws, the integral of a row is off by at most {number(error, 2)} nats"
        + (
            f", more than {ROW_ERROR}: the sites of a row are far from Normal given the row. Use "
            "at most two per row, or a distribution with lighter tails."
            if error > ROW_ERROR
            else "."
        ),
        "doubt",
    )


def _reaches_below_0(support: object) -> bool:
    """Return whether a support is other than the positive numbers, or has an upper bound."""
    support = getattr(support, "base_constraint", support)
    bound = getattr(support, "lower_bound", None)
    if bound is None or hasattr(support, "upper_bound"):
        return True
    return float(np.min(np.asarray(bound))) < 0.0


def _guides_of_clients(evidence: Evidence) -> Iterator[Check]:
    """Judge draws of clients' own sites, and those given the global ones, by client."""
    if evidence.entries is not None:
        yield evidence.entries.tails(question=OF_CLIENTS)
    if evidence.k_hats is None or (k_hats := evidence.k_hats.dropna()).empty:
        return
    bad = [f"{name} {number(k, 2)}" for name, k in k_hats[k_hats >= K_HAT].items()]
    off = "" if evidence.own is None else evidence.own.off()
    faults = []
    if bad:
        faults.append(
            f"The Pareto k-hat is {K_HAT} or more for {len(bad)} of {len(k_hats)} clients: {listed(bad)}."
        )
    if off:
        faults.append(
            f"Given the global sites, draws of {off} differ from their weighted draws: "
            "compare with NUTS, diagnostics.against_nuts(fit)."
        )
    yield answered(
        "Is the guide close enough for every client's own parameters, given the global ones?",
        bool(faults),
        " ".join(faults)
        or f"The largest Pareto k-hat of a client is {number(float(k_hats.max()), 2)}, below {K_HAT}.",
        "note" if evidence.own is None and not evidence.fit.progress.corrected else "doubt",
    )


def _rows(evidence: Evidence) -> Iterator[Check]:
    names = evidence.fit.clients
    counts = dict(zip(names, evidence.fit.federation.data.counts.tolist(), strict=True))
    short = [f"{name}: {count}" for name, count in counts.items() if count < FEW_ROWS]
    yield answered(
        "Does every client have enough rows?",
        bool(short),
        f"{len(short)} of {len(names)} clients {'has' if len(short) == 1 else 'have'} fewer than "
        f"{FEW_ROWS} rows ({listed(short)}): "
        "these rows are too few to show how well the model fits those clients."
        if short
        else f"Yes: the smallest client has {min(counts.values())} rows.",
    )
    if evidence.information is None:
        return
    nats = evidence.information["nats"]
    silent = list(nats.index[nats < LITTLE])
    yield answered(
        "Do the clients' own rows inform their estimates?",
        bool(silent),
        f"The rows of {len(silent)} of {len(names)} clients ({listed(silent)}) "
        f"add less than {LITTLE} nats of information: the posterior of such a client is nearly "
        "the global prior, which is what would be predicted for any client."
        if silent
        else f"Yes: every client's own rows add at least {number(float(nats.min()), 2)} nats of "
        "information to the global prior.",
    )
