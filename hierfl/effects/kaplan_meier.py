"""Kaplan-Meier curves and log-rank tests from counts of clients' times, also over nodes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from hierfl.core.arguments import expect_kind, spelled
from hierfl.core.intervals import PROB, check_prob, percent
from hierfl.core.tables import Shown, printed
from hierfl.effects.describe import least_of, what_is_left_out
from hierfl.effects.pooled_rows import order_of_groups
from hierfl.formulas.columns import by_client, complete
from hierfl.formulas.formula import Formula
from hierfl.formulas.time_answers import (
    LogrankSums,
    SurvivalAnswer,
    TimesAnswer,
    counted_at,
    logrank_sums,
    survival_answer,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]


@printed
@dataclass(frozen=True, eq=False)
class KaplanMeier:
    """Kaplan-Meier curves of all clients' rows, and whether those of groups differ.

    Args:
        title: whose times.
        response: the column of times.
        by: the column of the groups; None: there is one curve.
        frame: one row per group and time: `group`, `time`, `at_risk` just before it, `events`,
            `survival`, the probability to be beyond the time, `low` and `high`.
        groups: one row per group: `rows`, `events`, `median` of the times, `median_low` and
            `median_high`; NaN where a curve does not come down to a half.
        tests: of equal hazards of the groups: `chi2`, `df` and `p` of the log-rank test of all rows
            ("pooled", in one process), and of that within each client, summed ("by client").
        prob: of the intervals, which are symmetric on the scale of log(-log(survival)).
        left_out: client -> why it is not in it.
        note: how the numbers are to be read.
    """

    title: str
    response: str
    by: str | None
    frame: pd.DataFrame
    groups: pd.DataFrame
    tests: pd.DataFrame
    prob: float
    left_out: Mapping[str, str]
    note: str

    def __tables__(self) -> Shown:
        tables = (("Log-rank tests of equal hazards", self.tests),) if len(self.tests) else ()
        return Shown(self.title, self.groups, self.note, tables)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the curves as steps, with bands.

        Args:
            ax: axes to draw on. Default None: new ones.
        """
        from hierfl.plots.effects import new_axes, survival_steps

        axes = survival_steps(new_axes(ax), self.frame)
        axes.set(xlabel=self.response)
        return axes


@spelled
def kaplan_meier(
    rows: Any,
    formula: Formula,
    *,
    by: str | None = None,
    prob: float = PROB,
    least_count: int | None = None,
) -> KaplanMeier:
    """Estimate Kaplan-Meier curves of clients' times, and test whether those of groups differ.

    Each client returns how many of its rows had an event or were censored by each of its times.
    With `least_count` above 1, as always over nodes, it returns them for ranges of times in which
    at least that many rows leave, with events rounded to multiples of it. The curves are then
    actuarial life tables, in which a client's last rows are censored at the end of its last range.
    The log-rank test by client adds up O - E and its covariance, which each client computes from
    its own times (Mantel 1966); it compares only rows of the same client.

    Args:
        rows: frames or nodes, as for `hierfl.describe`; nodes answer under the same policy.
        formula: the formula whose response is described: `time`, or `time | event(status)` or `time
            | cens(status)` for right-censored times; with `entry(start)`, a row is at risk only if
            start < t <= time, and with `weights(w)`, it counts as w rows.
        by: a column whose values are the groups; or the column of clients. Default None: one curve.
        prob: of the intervals.
        least_count: an integer. Default None: 1 of frames, 5 over nodes.

    Raises:
        TypeError: there is no formula.
        KeyError: a client lacks a column.
        ValueError: times are below 0, not after their entries, or not right-censored; a column
            holds words; there are weights although numbers must rest on several rows; `least_count`
            is below 1; or no client has enough rows and events.
        Forbidden, TooFewNodes: no node's policy allows it, or too few nodes answer.
    """
    declare = "hierfl.formula('time | event(status) ~ 1', 'weibull', clients='hospital')"
    expect_kind(formula, Formula, "formula", f"declare one of the times, {declare}")
    check_prob(prob)
    over, least = least_of(rows, least_count)
    declared, is_client = formula.declared, by == formula.clients
    grouping = None if is_client else by
    left_out: Mapping[str, str] = {}
    frames: Mapping[str, pd.DataFrame] = {} if over else by_client(rows, formula.clients)
    if over:
        answers, left_out = rows.ask_about_rows(formula, "times", (), grouping, least)
    else:
        answers = {}
        read = [declared.parts.response, *declared.parts.additions.values()]
        kinds: dict[str, Any] = dict.fromkeys([*read, grouping] if grouping else read)
        for client, frame in frames.items():
            whole = complete(frame, kinds, client, declared.missing)
            answers[client] = survival_answer(whole, declared, grouping, client, least)
    return _made(answers, formula, by, least, prob, left_out, frames.values())


def _made(
    answers: Mapping[str, SurvivalAnswer],
    formula: Formula,
    by: str | None,
    least: int,
    prob: float,
    left_out: Mapping[str, str],
    rows: Iterable[pd.DataFrame],
) -> KaplanMeier:
    """Return the curves of clients' answers."""
    times_of: dict[str, list[TimesAnswer]] = {}
    for client, answer in answers.items():
        for group, times in answer.groups.items():
            times_of.setdefault(client if by == formula.clients else group, []).append(times)
    if not times_of:
        raise ValueError(f"no client has {least} rows with {least} events: nothing may leave")
    names = tuple(times_of)
    if by not in (None, formula.clients):
        names = order_of_groups(times_of, rows, by)
    frames, lines = [], []
    for group in names:
        curve = _exact(times_of[group]) if least == 1 else _life_table(times_of[group])
        curve = with_ends(curve, prob)
        frames.append(curve.assign(group=group))
        counts = {"rows": sum(of.rows for of in times_of[group]), "events": curve["events"].sum()}
        lines.append({"group": group, **counts, **_median(curve)})
    response = formula.declared.parts.response
    groups = pd.DataFrame(lines)
    if least == 1 and "weights" not in formula.declared.parts.additions:
        groups = groups.astype({"events": "int64"})
    return KaplanMeier(
        title=f"{response} of {len(answers)} clients{f', by {by}' if by else ''}",
        response=response,
        by=by,
        frame=pd.concat(frames, ignore_index=True)[["group", *CURVE, "low", "high"]],
        groups=groups if by else groups.drop(columns="group"),
        tests=_tests(answers, times_of, names, least),
        prob=prob,
        left_out=left_out,
        note=_note(answers, least, prob, left_out),
    )


CURVE = ["time", "at_risk", "events", "survival"]


def _exact(answers: Sequence[TimesAnswer]) -> pd.DataFrame:
    """Return the curve of times that are all known."""
    when = np.array(sorted({end for times in answers for end in times.ends}))
    gone, happened, risk = counted_at(answers, when)
    whole = pd.DataFrame({"time": when, "at_risk": risk, "events": happened, "left": risk})
    return whole[gone > 0.0]  # at others rows enter


def _life_table(answers: Sequence[TimesAnswer]) -> pd.DataFrame:
    """Return the actuarial curve: those who are censored in a range, or enter in it, count half of it."""
    first = np.nextafter(0.0, -1.0)  # so that those who leave at time 0 have a range
    when = np.array(sorted({first, *(end for times in answers for end in times.ends)}))
    risk, happened, lost, joined = (np.zeros(len(when) - 1) for _ in range(4))
    for times in answers:
        ends = [first, *times.ends]
        there = when[1:] <= ends[-1]  # later its last rows are censored
        counts = ([0, *times.exits], [0, *times.events], times.entries or [times.rows] * len(ends))
        exits, events, entries = (np.interp(when, ends, of) for of in counts)
        risk += there * (entries[:-1] - exits[:-1])
        happened += there * np.diff(events)
        lost += there * np.maximum(np.diff(exits) - np.diff(events), 0.0)
        joined += there * np.diff(entries)
    exposed = risk - 0.5 * lost + 0.5 * joined
    columns = {"time": when[1:], "at_risk": risk, "events": happened, "left": exposed}
    return pd.DataFrame(columns)[exposed > 0.0]


def with_ends(curve: pd.DataFrame, prob: float) -> pd.DataFrame:
    """Add the survival probability, and Greenwood's interval on the scale of log(-log S)."""
    d, n = curve["events"].to_numpy(), curve["left"].to_numpy()
    share = np.minimum(d / n, 1.0)
    beyond = (1.0 - share).cumprod()
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.sqrt((share / (n * (1.0 - share))).cumsum()) / np.log(beyond)
        z = stats.norm.ppf(0.5 + prob / 2.0)
        low, high = (beyond ** np.exp(sign * z * spread) for sign in (-1.0, 1.0))
    none = beyond == 1.0
    return curve.assign(
        survival=beyond, low=np.where(none, 1.0, low), high=np.where(none, 1.0, high)
    )


def _median(curve: pd.DataFrame) -> dict[str, float]:
    """Return the first time at which the curve is at a half or below, and those of its ends."""
    medians = {}
    for name, of in (("median", "survival"), ("median_low", "low"), ("median_high", "high")):
        at = curve.loc[curve[of] <= 0.5 + 1e-12, "time"]  # a half, up to rounding
        medians[name] = float(at.iloc[0]) if len(at) else np.nan
    return medians


# ------------------------------------------------------------ log-rank
def _tests(
    answers: Mapping[str, SurvivalAnswer],
    times_of: Mapping[str, Sequence[TimesAnswer]],
    names: Sequence[str],
    least: int,
) -> pd.DataFrame:
    """Return the log-rank tests that clients' answers allow."""
    lines = {}
    if len(names) > 1 and least == 1:
        ends = (times.ends for of in times_of.values() for times in of)
        when = np.array(sorted({*chain.from_iterable(ends)}))
        counts = [counted_at(times_of[name], when) for name in names]
        risk, happened = (np.stack([of[k] for of in counts], 1) for k in (2, 1))
        is_event = happened.sum(1) > 0.0
        lines["pooled"] = _test(*logrank_sums(risk[is_event], happened[is_event]))
    own = [answer.logrank for answer in answers.values() if answer.logrank is not None]
    if own:
        lines["by client"] = _test(*_summed(own, names))
    return pd.DataFrame(lines, index=["chi2", "df", "p"]).T


def _summed(own: Sequence[LogrankSums], names: Sequence[str]) -> tuple[Floats, Floats]:
    """Return the sums over clients of O - E and its covariance."""
    excess, covariance = np.zeros(len(names)), np.zeros((len(names), len(names)))
    for sums in own:
        at = [names.index(group) for group in sums.groups]
        excess[at] += sums.excess
        own_covariance = np.array(sums.covariance)
        np.fill_diagonal(own_covariance, 0.0)
        # rows add up to 0 again, which rounding has changed: else there is one df too many
        covariance[np.ix_(at, at)] += own_covariance - np.diag(own_covariance.sum(1))
    return excess, covariance


def _test(excess: Floats, covariance: Floats) -> list[float]:
    """Return chi-squared, its degrees of freedom, and p."""
    inverse = np.linalg.pinv(covariance, rcond=1e-6, hermitian=True)
    df = int(np.linalg.matrix_rank(covariance, tol=1e-6 * np.abs(covariance).max(), hermitian=True))
    chi2 = float(excess @ inverse @ excess)
    return [chi2, df, float(stats.chi2.sf(chi2, df))]


def _note(
    answers: Mapping[str, SurvivalAnswer], least: int, prob: float, left_out: Mapping[str, str]
) -> str:
    lines = [f"median_low and median_high are the ends of the {percent(prob)} interval."]
    if least > 1:
        lines.append(f"Events are to the nearest {least}, and curves those of life tables.")
    return "\n".join([*lines, *what_is_left_out(answers, left_out)])
