"""The summary of a fit: its posterior as a table, and under it whether to trust it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from hierfl.core.arguments import shown
from hierfl.core.intervals import PROB, check_prob, least_draws, percent, tails
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, shown_as
from hierfl.core.trees import nbytes
from hierfl.diagnostics.check import Check
from hierfl.diagnostics.checks import checks_of_fit
from hierfl.diagnostics.verdict import draws_of_rows, evidence, of_history, verdict
from hierfl.engine.rounds import JUDGED, chosen_of, is_corrected, left_out_of
from hierfl.formulas.formula import Formula
from hierfl.formulas.layout import INTERCEPT, GroupTerm, Layout
from hierfl.posterior.site_table import SiteTable, site_table
from hierfl.posterior.snapshot import Snapshot, expect_fit, lacks_rows

MOST, FEWEST = 1000, 100  # draws where none are asked for
# scalars drawn in all; rows times local scalars, if the guide reads all rows at each draw
DRAWN, READ = 100_000_000, 4_000_000


def _shown(found: Summary) -> Shown:
    note = "\n".join((found.verdict, *found.remarks))
    if found.tables:
        return Shown(found.title, note=note, tables=found.tables)
    return Shown(found.title, found.frame, note)


@shown_as(_shown)
@dataclass(frozen=True, eq=False)
class Summary:
    """The posterior of every site as a table, and whether to trust it.

    Args:
        title: what was run.
        frame: one row a number: `site`; `entry`, its place in the site, by feature names where it
            has them; `client`, "" for a global site; `mean`, `sd`, and `low` and `high`, the ends
            of the interval, NaN at point estimates; `shrinkage` of
            local sites, 0 where the client's own rows decide alone, 1 where they say nothing
            (`hierfl.posterior.shrinkage`). Networks of many numbers have one row for each statistic
            of each layer.
        verdict: trustworthy, or why not, with the fix; below it, a line for each other warning of
            the checks.
        trustworthy: the same as a bool; None where it cannot be told.
        remarks: what the table leaves out.
        tables: the same numbers of a formula as they are printed, in brms's order, each table with
            its heading; () of other models.
        checks: those of `fit.report()` that need no further rows, with their answers.
        prob: of the intervals.
    """

    title: str
    frame: pd.DataFrame
    verdict: str
    trustworthy: bool | None
    remarks: tuple[str, ...] = ()
    tables: tuple[tuple[str, pd.DataFrame], ...] = ()
    checks: tuple[Check, ...] = ()
    prob: float = PROB


@one_at_a_time
def summary(
    fit: Snapshot, *, prob: float = PROB, draws: int | None = None, seed: int = 0
) -> Summary:
    """Summarize the posterior of every site, and judge it.

    Args:
        fit: a run at some round.
        prob: of the intervals, whose ends are quantiles of the draws.
        draws: S, of the posterior; None: 1000, and down to 100 where they would take minutes.
        seed: of the draws.

    Raises:
        ValueError: `draws` is too small for an interval of `prob`, 20 of 90 %, 40 of 95 %; or `prob`
            does not lie between 0 and 1.
    """
    expect_fit(fit)
    least = least_draws(check_prob(prob))
    draws = max(least, _affordable(fit)) if draws is None else draws
    if not isinstance(draws, int) or draws < least:
        raise ValueError(
            f"draws is {shown(draws)}: a {percent(prob)} interval needs an integer of {least} or more"
        )
    table = site_table(fit, draws=draws, seed=seed, keep=draws_of_rows(fit, draws), prob=prob)
    checks = checks_of_fit(evidence(fit, table, draws=draws, seed=seed))
    judged = verdict(checks)
    data = fit.federation.data
    title = (
        f"{fit.method.name}: {len(fit.clients)} clients, {data.num_rows} rows, "
        f"{fit.progress.round} rounds, {draws} draws"
    )
    model = fit.method.model
    tables = (
        formula_tables(model, table.frame, fit.clients, prob) if isinstance(model, Formula) else ()
    )
    if isinstance(model, Formula):
        title = f"{titled(model)}\n{title}"
    remarks = _remarks(fit, table)
    return Summary(
        title,
        table.frame,
        judged.words,
        judged.trustworthy,
        remarks,
        tables,
        tuple(checks),
        prob,
    )


def _affordable(fit: Snapshot) -> int:
    """Return how many draws take only seconds."""
    latents, data = fit.program.latents, fit.federation.data
    own = latents.local_block.size
    numbers = latents.global_block.size + own * len(fit.clients)
    most = DRAWN // max(1, numbers)
    if fit.program.reads_all_rows:
        most = min(most, READ // max(1, data.num_rows * own))
    return max(FEWEST, min(MOST, most))


def brief(fit: Snapshot) -> Shown:
    """Return what a fit prints: what was run, sizes, and what its history alone says of trust."""
    times = left_out_of(fit.progress.history)
    skipped = f"a client skipped {times} time{'s' * (times > 1)}, " if times else ""
    kept = nbytes(fit.federation.client.own)
    title = (
        f"Fit({fit.method.name}, {len(fit.clients)} clients, {fit.progress.round} rounds, "
        f"{skipped}{fit.federation.data.num_rows} rows, {nbytes(fit.message)} bytes sent to a "
        f"client, {kept} bytes kept by one)"
    )
    known, chosen = of_history(fit), chosen_of(fit.progress.history)
    hint = "fit.summary() shows every site by client, and whether to trust it."
    lines = [f"Chosen: {chosen}."] if chosen else []
    judged = fit.progress.history[-1].get(JUDGED) if fit.progress.history else None
    lines += [str(judged)] if known is None and judged else [] if known is None else [known.words]
    return Shown(title, note="\n".join((*lines, hint)))


def _remarks(fit: Snapshot, table: SiteTable) -> tuple[str, ...]:
    chosen = chosen_of(fit.progress.history)
    remarks = [f"Chosen: {chosen}."] if chosen else []
    if is_corrected(fit.progress.history):
        remarks.append(
            "The table shows the guide's own draws; fit.posterior() corrects them by importance "
            "weights."
        )
    if table.by_layer:
        names = ", ".join(f"'{name}'" for name in table.by_layer)
        remarks.append(
            "Summarized by layer, as mean, sd, root mean square and largest of its numbers: "
            f"{names}."
        )
    if table.points:
        names = ", ".join(f"'{name}'" for name in table.points[:5])
        more = f" and {len(table.points) - 5} more" if len(table.points) > 5 else ""
        remarks.append(f"Point estimates, without sd and interval: {names}{more}.")
    if table.without_local:
        remarks.append(
            "Local sites are left out, since they depend on rows that were not saved with the "
            "fit: hand them in, hierfl.load(folder, data=...)."
        )
    elif lacks_rows(fit):
        remarks.append("Shrinkage is left out, since the rows were not saved with the fit.")
    return tuple(remarks)


# Column of the summary's frame -> as brms calls it, with the ends of a 90 % interval.
NAMES = {"mean": "estimate", "sd": "est. error", "low": "5 %", "high": "95 %"}
Tables = tuple[tuple[str, pd.DataFrame], ...]


def titled(formula: Formula) -> str:
    """Return the formula, its family and which of two levels is 1, the first line of the summary."""
    family = formula.family
    levels = formula.agreed.columns[formula.declared.parts.response].levels
    of_one = f"; 1 is {levels[1]}" if family.kind == "binary" and levels else ""
    return f"{formula.text}, {family.name} with link {family.link}{of_one}"


def formula_tables(
    formula: Formula, frame: pd.DataFrame, clients: Sequence[str], prob: float = PROB
) -> Tables:
    """Return the tables of a summary's frame, each with its heading, without empty ones."""
    layout, layouts = formula.layout, formula.layouts
    groups = [term for found in layouts for term in found.groups]
    common = [INTERCEPT, *_common_sites(layout)]
    heading = "Population level"
    if layout.has_intercept and layout.is_centered and layout.common.columns:
        heading += f" ({INTERCEPT}: where all predictors are at their means)"
    tables = [(heading, _table(frame, common))]
    for other in layouts[1:]:
        name = other.suffix.removeprefix("_")
        sites = [other.intercept, *_common_sites(other)]
        link = formula.parameters[name].declared.family.link
        tables.append((f"Population level of {name}, link {link}", _table(frame, sites)))
        common += sites
    for term in groups:
        tables.append(
            (f"Group level, {_groups(formula, term, len(clients))}", _spread(frame, term))
        )
    others = {*common, *(name for term in groups for name in _sites_of(term))}
    left = [name for name in dict.fromkeys(frame["site"]) if name not in others]
    tables.append((f"Family, {formula.family.name}", _table(frame, left)))
    for term in groups:
        own = term.place in ("clients", "within")
        what = "own coefficients" if term.place == "clients" else "deviations"
        of = f"{term.site if ';' in formula.text else term.group.name}: {what}"
        of += " by client" if own else ""
        rows = frame if term.place != "within" else _named_inside(formula, term, frame)
        tables.append((of, _table(rows, [term.site], shrinkage=own)))
    ends = dict(zip((NAMES["low"], NAMES["high"]), map(percent, tails(prob)), strict=True))
    return tuple((heading, table.rename(columns=ends)) for heading, table in tables if len(table))


def _common_sites(layout: Layout) -> list[str]:
    """Return the sites of the common terms."""
    found = []
    for term in layout.common.terms:
        found += [f"b_{term.name}", f"simplex_{term.name}"] if term.monotone else []
        found.append(term.name)
    return found


def _named_inside(formula: Formula, term: GroupTerm, frame: pd.DataFrame) -> pd.DataFrame:
    """Name the groups within clients where names are known, without those that a client lacks."""
    some = frame[frame["site"] == term.site]
    parts = some["entry"].str.partition(", ")
    known = [formula._inside.get((client, term.group.name)) for client in some["client"]]
    of = [
        (*n, *[None] * term.size)[int(k)] if n else k for n, k in zip(known, parts[0], strict=True)
    ]
    named = pd.Series(of, some.index, dtype=object)
    return some.assign(entry=named + parts[1] + parts[2])[named.notna()]


def _sites_of(term: GroupTerm) -> tuple[str, ...]:
    return (term.site, term.sd, term.cor or "", term.cholesky)


def _groups(formula: Formula, term: GroupTerm, clients: int) -> str:
    if term.place == "clients":
        return f"{term.site} ({clients} groups)"
    if term.place == "within":
        return f"{term.site} (at most {term.size} groups in one {formula.clients})"
    return f"{term.site} ({term.size} groups)"


def _table(frame: pd.DataFrame, sites: Sequence[str], *, shrinkage: bool = False) -> pd.DataFrame:
    """Return the rows of some sites, named as brms names them: `age`, `sex[male]`."""
    some = frame[frame["site"].isin(sites)]
    some = some.sort_values("site", key=lambda s: s.map(list(sites).index), kind="stable")
    found = some[[*NAMES, "shrinkage"] if shrinkage else [*NAMES]].rename(columns=NAMES)
    single = len(sites) == 1 and bool((some["client"] != "").any())
    if single:
        found.insert(0, "client", some["client"])
        if (some["entry"] != "").any():
            found.insert(1, "term", some["entry"])
        return found.reset_index(drop=True)
    found.index = pd.Index(
        [f"{s}[{e}]" if e else s for s, e in zip(some["site"], some["entry"], strict=True)]
    )
    return found


def _spread(frame: pd.DataFrame, term: GroupTerm) -> pd.DataFrame:
    """Return the standard deviations of a term, and each correlation once."""
    sds = frame[frame["site"] == term.sd]
    names = [entry or INTERCEPT for entry in sds["entry"]]
    parts = [sds.assign(name=[f"sd({name})" for name in names])]
    if term.cor:
        both = frame[frame["site"] == term.cor]
        pairs = {f"{a}, {b}": f"cor({a}, {b})" for i, a in enumerate(names) for b in names[i + 1 :]}
        once = both[both["entry"].isin(pairs)]
        parts.append(once.assign(name=[pairs[entry] for entry in once["entry"]]))
    found = pd.concat(parts)
    table = found[[*NAMES]].rename(columns=NAMES)
    table.index = pd.Index(list(found["name"]))
    return table
