"""The summary of a fit: its posterior as a table, and under it whether to trust it."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import pandas as pd

from hierfl.core.arguments import shown
from hierfl.core.intervals import PROB, check_draws, check_prob, least_draws, percent
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.core.trees import nbytes
from hierfl.diagnostics.check import Check
from hierfl.diagnostics.checks import checks_of_fit
from hierfl.diagnostics.verdict import draws_of_rows, evidence, of_history, verdict
from hierfl.engine.rounds import times_left_out
from hierfl.posterior.draws import Draws, posterior_draws
from hierfl.posterior.site_table import SiteTable, frame_of_draws, in_right_digits, site_table
from hierfl.posterior.snapshot import Snapshot, expect_fit, global_sites, lacks_rows

MOST, FEWEST = 1000, 100  # draws where none are asked for
# scalars drawn in all; rows times local scalars, if the guide reads all rows at each draw
DRAWN, READ = 100_000_000, 4_000_000


@printed
@dataclass(frozen=True, eq=False)
class Summary:
    """The posterior of every site as a table, and whether to trust it.

    Args:
        title: what was run.
        frame: one row per scalar: `site`; `entry`, its place in the site, by feature names if it
            has them; `client`, "" for a global site; `mean`, `sd`, and `low` and `high`, the ends
            of the interval, NaN for point estimates; `shrinkage` of local sites, 0 if the client's
            own rows decide alone, 1 if they say nothing (`hierfl.posterior.shrinkage`), and its
            Monte Carlo standard error. Large networks have one row for each statistic of each
            layer.
        verdict: whether to trust the fit, and if not, why and how to fix it; below, a line for each
            other warning of the checks.
        trustworthy: the same as a bool; None if it is not known.
        remarks: what the table leaves out.
        tables: for a formula, the same numbers as they are printed, in brms's order, each table
            with its heading; () for other models.
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

    def __tables__(self) -> Shown:
        note = "\n".join((self.verdict, *self.remarks))
        if self.tables:
            return Shown(self.title, note=note, tables=self.tables)
        return Shown(self.title, in_right_digits(self.frame), note)


@one_at_a_time
def summary(
    fit: Snapshot, *, prob: float = PROB, draws: int | None = None, seed: int = 0
) -> Summary:
    """Summarize the posterior of every site, and judge it.

    Args:
        fit: a run at some round.
        prob: of the intervals, whose ends are quantiles of the draws.
        draws: S, of the posterior. None: 1000, or fewer, down to 100, if they would take minutes.
        seed: of the draws.

    Raises:
        ValueError: `draws` is too small for an interval of `prob`, 20 of 90%, 40 of 95%; or `prob`
            does not lie between 0 and 1.
    """
    expect_fit(fit)
    least = least_draws(check_prob(prob))
    draws = max(least, _affordable(fit)) if draws is None else draws
    if not isinstance(draws, Integral) or draws < least:
        raise ValueError(
            f"draws is {shown(draws)}: a {percent(prob)} interval needs an integer of {least} or more"
        )
    table = site_table(fit, draws=draws, seed=seed, keep=draws_of_rows(fit, draws), prob=prob)
    checks = checks_of_fit(evidence(fit, table, draws=draws, seed=seed))
    judged = verdict(checks)
    data = fit.federation.data
    title, tables = _printed(fit, f"{data.num_rows} rows, ", table.frame, draws, prob)
    verdict_of_checks = (judged.words, judged.trustworthy)
    remarks = _remarks(fit, table)
    return Summary(title, table.frame, *verdict_of_checks, remarks, tables, tuple(checks), prob)


def _printed(
    fit: Snapshot, rows: str, frame: pd.DataFrame, draws: int, prob: float
) -> tuple[str, tuple[tuple[str, pd.DataFrame], ...]]:
    """Return what was run, and the tables of a formula."""
    rounds = fit.progress.round
    title = (
        f"{fit.method.name}: {len(fit.clients)} clients, {rows}{rounds} round{'s' * (rounds != 1)}, "
        f"{draws} draws"
    )
    model: Any = fit.method.model
    if not hasattr(model, "declared"):
        return title, ()
    from hierfl.diagnostics.formula_tables import formula_tables, titled  # 0.5 s

    tables = formula_tables(model, in_right_digits(frame), fit.clients, prob)
    return f"{titled(model)}\n{title}", tables


def summary_of_globals(
    fit: Snapshot,
    judged: tuple[str, bool | None],
    *,
    prob: float,
    draws: int,
    seed: int,
    remarks: tuple[str, ...],
) -> Summary:
    """Summarize the global sites alone, which a server knows, under what is judged of them."""
    check_draws(draws, check_prob(prob))
    sites = global_sites(fit.program)
    drawn = posterior_draws(fit, draws=draws, seed=seed, keep=sites) if sites else Draws({}, {})
    frame = frame_of_draws(fit, Draws(drawn.shared, {}), prob)
    title, tables = _printed(fit, "", frame, draws, prob)
    return Summary(title, frame, *judged, remarks, tables, (), prob)


def _affordable(fit: Snapshot) -> int:
    """Return how many draws take only seconds."""
    latents, data = fit.program.latents, fit.federation.data
    own = latents.local_block.size
    numbers = latents.global_block.size + own * len(fit.clients)
    limit = DRAWN // max(1, numbers)
    if fit.program.reads_all_rows:
        limit = min(limit, READ // max(1, data.num_rows * own))
    return max(FEWEST, min(MOST, limit))


def brief(fit: Snapshot) -> Shown:
    """Return what a fit prints: what was run, sizes, and what its history alone says of trust."""
    times = times_left_out(fit.progress.history)
    skipped = f"a client skipped {times} time{'s' * (times > 1)}, " if times else ""
    own_bytes = nbytes(fit.federation.client.own)
    rounds = fit.progress.round
    title = (
        f"Fit({fit.method.name}, {len(fit.clients)} clients, {rounds} round{'s' * (rounds != 1)}, "
        f"{skipped}{fit.federation.data.num_rows} rows, {nbytes(fit.message)} bytes sent to a "
        f"client, {own_bytes} bytes kept by one)"
    )
    of_rounds, chosen, judged = of_history(fit), fit.progress.chosen, fit.progress.verdict
    if of_rounds is not None:  # good rounds are not all that a summary asks
        judged = of_rounds.reasons if of_rounds.trustworthy else of_rounds.words
    hint = "fit.summary() shows every site by client, and whether to trust it."
    lines = (f"Chosen: {chosen}." if chosen else "", judged, hint)
    return Shown(title, note="\n".join(line for line in lines if line))


def _remarks(fit: Snapshot, table: SiteTable) -> tuple[str, ...]:
    chosen = fit.progress.chosen
    remarks = [f"Chosen: {chosen}."] if chosen else []
    if fit.progress.corrected and lacks_rows(fit):
        remarks.append(
            "The table shows the guide's own draws, since the rows by which they are corrected were "
            "not saved with the fit."
        )
    if table.by_layer:
        names = ", ".join(f"'{name}'" for name in table.by_layer)
        remarks.append(
            "Summarized by layer, as mean, sd, root mean square and largest of its numbers: "
            f"{names}."
        )
    if table.points:
        names = ", ".join(f"'{name}'" for name in table.points[:5])
        others = f" and {len(table.points) - 5} more" if len(table.points) > 5 else ""
        remarks.append(f"Point estimates, without sd and interval: {names}{others}.")
    for what, sites in (("", table.unknown), ("the shrinkage of ", table.unshrunk)):
        names = ", ".join(f"'{name}'" for name in sites)
        if names:
            remarks.append(
                f"Left out, since they depend on rows that were not saved with the fit: {what}{names}. "
                "Pass the rows, hierfl.load(folder, data=...)."
            )
    return tuple(remarks)
