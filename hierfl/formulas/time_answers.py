"""What one client answers about times: cumulative entries, exits and events, and its own log-rank sums."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hierfl.core.typed_json import Count, CountOrFew, Number, made_of
from hierfl.formulas.columns import CENSORED, column_fault, level_name, named, number_column
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.table_answers import (
    MOST_ENDS,
    faults_of_names,
    on_grid,
    rounded_count,
    rows_by_group,
)

Floats = NDArray[np.float64]
MOST_GROUPS = 50
EVENTS = (
    "must be 0 or 1, or False or True: from R's codes 1 and 2 subtract 1; of several causes, make a "
    "column of one"
)


class Observed(NamedTuple):
    """Rows with a time: its end, whether by an event, its start (-inf: from the first on), and the row's weight."""

    end: Floats
    event: NDArray[np.bool_]
    start: Floats
    weight: Floats

    def of(self, rows: NDArray[np.bool_]) -> "Observed":
        """Return some of the rows, (n,)."""
        return Observed(self.end[rows], self.event[rows], self.start[rows], self.weight[rows])


@dataclass(frozen=True)
class TimesAnswer:
    """Rows of a group; how many had left, by an event or censored, and had an event, by each of `ends`.

    With `least` 1 these are the client's distinct times, and rows count by their weights. Above 1, so
    many leave between two of them, and events are rounded to multiples of it.

    `entries` counts those who had entered before the first time (with `least` above 1: by time 0), and
    by each of `ends`; () if all had from the first on.
    """

    rows: Count
    ends: tuple[Number, ...]
    exits: tuple[Number, ...]
    events: tuple[Number, ...]
    entries: tuple[Number, ...] = ()


@dataclass(frozen=True)
class LogrankSums:
    """Events less those expected if all groups had one hazard, (G,), and their covariance, (G, G)."""

    groups: tuple[str, ...]
    excess: tuple[Number, ...]
    covariance: tuple[tuple[Number, ...], ...]


@dataclass(frozen=True)
class SurvivalAnswer:
    """Group -> times; the client's own log-rank sums; `left` counts the rows of groups that are too small."""

    groups: Mapping[str, TimesAnswer]
    logrank: LogrankSums | None
    left: CountOrFew = 0


def observed_times(frame: pd.DataFrame, declared: Declaration, client: str, least: int) -> Observed:
    """Return a client's times; refuse what no Kaplan-Meier curve is of."""
    response, additions = declared.parts.response, declared.parts.additions
    others = sorted(additions.keys() - {"event", "cens", "entry", "weights"})
    others += ["trunc"] if declared.parts.bounds else []
    if others:
        what = f"{others[0]}({additions.get(others[0], '...')}), of which no Kaplan-Meier curve is made"
        fix = "times may be censored on the right alone, event(status) or cens(status)"
        raise ValueError(f"'{response}' has {what}: {fix}")
    if "weights" in additions and least > 1:
        fix = "leave them out of the formula, or use least_count=1 where the rows are"
        what = f"has weights({additions['weights']}), which could be solved for"
        raise ValueError(f"'{response}' {what}: {fix}")

    def column(addition: str, default: float) -> Floats:
        name = additions.get(addition)
        if name is None:
            return np.full(len(frame), default)
        return number_column(frame[name], name, client)

    end = number_column(frame[response], response, client)
    start, weight = column("entry", -np.inf), column("weights", 1.0)
    public, detail, name = "", "", response
    if not (np.isfinite(end) & (end >= 0.0)).all():
        public = "must be finite and not below 0"
    elif not (start < end).all():
        public, name = f"must be below '{response}'", additions["entry"]
        detail = ": a row is observed from its entry to its time"
    elif not ((weight > 0.0) & np.isfinite(weight)).all():
        public, name = "must be above 0", additions["weights"]
    if public:
        raise column_fault(public + detail, public, name, client)
    return Observed(end, _events(frame, additions, client), start, weight)


def _events(frame: pd.DataFrame, additions: Mapping[str, str], client: str) -> NDArray[np.bool_]:
    """Return whether each time ended in an event."""
    if not {"event", "cens"} & additions.keys():
        return np.ones(len(frame), dtype=bool)
    of_event = "event" in additions
    name, public = additions["event" if of_event else "cens"], "must be 0 (none) or 1 (right)"
    if of_event:
        codes, public = number_column(frame[name], name, client), EVENTS
    else:
        codes = np.array([CENSORED.get(level_name(value), np.nan) for value in frame[name]])
    if not np.isin(codes, (0.0, 1.0)).all():
        raise column_fault(public, public, name, client)
    return codes == float(of_event)


def survival_answer(
    frame: pd.DataFrame, declared: Declaration, by: str | None, client: str, least: int
) -> SurvivalAnswer:
    """Return a client's answer about its times, by the values of a column."""
    rows = observed_times(frame, declared, client, least)
    groups, small, by_group = {}, 0, rows_by_group(frame, by, client)
    for name, own in sorted(by_group, key=lambda item: (int(item[1].sum()), item[0])):
        # a difference from all rows, whose number is known, would reveal a small group
        is_small = own.sum() < least or 0 < rows.event[own].sum() < least or 0 < small < least
        small += int(own.sum()) if is_small else 0
        if not is_small:
            groups[name] = times_answer(rows.of(own), least)
    names = np.full(len(frame), "", dtype=np.str_) if by is None else named(frame[by], by, client)
    there = np.isin(names, list(groups))
    logrank = client_logrank(rows.of(there), names[there], least)
    return SurvivalAnswer(groups, logrank, rounded_count(small, least))


def times_answer(rows: Observed, least: int) -> TimesAnswer:
    """Return cumulative entries, exits and events at the ends of ranges in which `least` rows or more leave."""
    is_late, at = np.isfinite(rows.start), rows.end if least == 1 else on_grid(rows.end)
    ends = np.unique(np.concatenate([at, rows.start[is_late]]) if least == 1 else at)

    def by_each(times: Floats, weight: Floats) -> Floats:
        place = np.searchsorted(ends, times)
        within = place < len(ends)
        return np.bincount(place[within], weight[within], len(ends)).cumsum()

    exits, events = by_each(at, rows.weight), by_each(at[rows.event], rows.weight[rows.event])
    entries = np.array([])
    if is_late.any():
        before = ~is_late if least == 1 else rows.start <= 0.0
        later = by_each(rows.start[~before], rows.weight[~before])
        entries = rows.weight[before].sum() + np.concatenate([[0.0], later])
    if least == 1:
        return TimesAnswer(
            len(at), *(tuple(map(float, of)) for of in (ends, exits, events, entries))
        )
    chosen, gone = [], 0
    for k, upto in enumerate(exits.astype(int).tolist()):
        if upto - gone >= least and len(at) - upto >= least:
            chosen.append(k)
            gone = upto
    happened = np.minimum(least * np.round(events / least), exits)
    at_ends = entries[[0, *(k + 1 for k in chosen)]] if len(entries) else entries
    entered = least * np.round(at_ends / least)
    return TimesAnswer(
        len(at),
        tuple(float(ends[k]) for k in chosen),
        tuple(int(exits[k]) for k in chosen),
        tuple(int(happened[k]) for k in chosen),
        tuple(int(min(count, len(at))) for count in entered),
    )


def counted_at(answers: Sequence[TimesAnswer], when: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the rows that leave at some times, the events among them, and the rows at risk, (T,) each.

    At risk at t are those who entered before t and have not left before it. Answers have a `least` of 1.
    """
    gone, happened, risk = (np.zeros(len(when)) for _ in range(3))
    for answer in answers:
        before, upto = (np.searchsorted(answer.ends, when, side) for side in ("left", "right"))
        exits, events = np.array([0.0, *answer.exits]), np.array([0.0, *answer.events])
        entered = np.array(answer.entries)[before] if answer.entries else exits[-1]
        gone += exits[upto] - exits[before]
        happened += events[upto] - events[before]
        risk += entered - exits[before]
    return gone, happened, risk


def client_logrank(rows: Observed, names: Any, least: int) -> LogrankSums | None:
    """Return a client's log-rank sums; None where it has fewer than two groups, or too few events.

    O - E of each group, and its hypergeometric covariance (Mantel 1966), summed over the times. With
    `least` above 1 the sums are of a table of ranges of times, whose counts are multiples of it.
    """
    groups = sorted(set(names.tolist()))
    if len(groups) < 2 or rows.event.sum() < least:
        return None
    when = np.unique(rows.end[rows.event])
    counts = [counted_at([times_answer(rows.of(names == group), 1)], when) for group in groups]
    risk, happened = (np.stack([of[k] for of in counts], 1) for k in (2, 1))
    if least > 1:
        first = int((risk.min(1) >= least).argmax())  # before it too few have entered
        risk, happened = _coarse(risk[first:], happened[first:], least)
    if not len(risk):
        return None
    excess, covariance = logrank_sums(risk, happened)
    if least > 1:  # of counts that are rounded to multiples of it
        covariance = covariance + least**2 / 12.0 * (np.eye(len(groups)) - 1.0 / len(groups))
    own = tuple(tuple(map(float, row)) for row in covariance)
    return LogrankSums(tuple(groups), tuple(map(float, excess)), own)


def _coarse(risk: Floats, happened: Floats, least: int) -> tuple[Floats, Floats]:
    """Return rows at risk and events of ranges with `least` events or more, rounded to multiples of it, (T, G) both.

    In each range every group has `least` rows at risk; later times are left out. Events are rounded
    as they add up, so that their rounding errors do not.
    """
    starts, ends, before = list[int](), list[int](), 0.0
    for k, upto in enumerate(happened.sum(1).cumsum().tolist()):
        if risk[k].min() < least:
            break
        if upto - before >= least:
            starts.append(ends[-1] + 1 if ends else 0)
            ends.append(k)
            before = upto
    rounded = least * np.rint(happened.cumsum(0)[ends] / least)
    of_range = np.diff(rounded, axis=0, prepend=0.0)
    there = least * np.rint(risk[starts] / least)
    some = of_range.sum(1) > 0.0
    return there[some], np.minimum(of_range, there)[some]


def logrank_sums(risk: Floats, happened: Floats) -> tuple[Floats, Floats]:
    """Return the sums over times of observed less expected events, (G,), and of their covariances, (G, G)."""
    n, d = risk.sum(1), happened.sum(1)
    share = risk / n[:, None]
    excess: Floats = (happened - d[:, None] * share).sum(0)
    spread = np.where(n > 1.0, d * (n - d) / np.maximum(n - 1.0, 1.0), 0.0)
    shares = share[:, :, None]
    of_shares = np.eye(risk.shape[1]) * shares - shares * share[:, None, :]
    covariance: Floats = (spread[:, None, None] * of_shares).sum(0)
    return excess, covariance


# ------------------------------------------------------------ as JSON, of a node that may lie
def survival_from_json(document: Any, least: int) -> SurvivalAnswer:
    """Return the answer of some JSON that `survival_answer` was written as, or raise ValueError."""
    made: SurvivalAnswer = made_of(SurvivalAnswer, document)
    if fault := next(_faults(made, least), ""):
        raise ValueError(fault)
    return made


def _faults(made: SurvivalAnswer, least: int) -> Iterator[str]:
    yield from faults_of_names({*made.groups}, MOST_GROUPS)
    if not all(map(_rises, made.groups.values())):
        yield "its counts do not rise with its times, or it has more events than exits"
    if any(of.rows < least for of in made.groups.values()):
        yield "it has groups of few rows"
    if made.logrank is None:
        return
    sums, names = made.logrank, {*made.logrank.groups}
    sizes = {len(sums.groups), len(sums.excess), len(sums.covariance)}
    sizes |= {*map(len, sums.covariance)}
    if len(sizes) > 1 or not names or not names <= {*made.groups} or len(names) < len(sums.groups):
        yield "its log-rank sums are of other groups"
        return
    covariance, excess = np.array(sums.covariance), np.array(sums.excess)
    size = 1e-6 * np.abs(covariance).max()
    if (np.abs(covariance - covariance.T) > size).any() or (abs(covariance.sum(0)) > size).any():
        yield "its log-rank covariance is not symmetric, or has rows that do not add up to 0"
    if not np.linalg.eigvalsh(covariance).min() > -1e3 * size:
        yield "its log-rank covariance has a negative eigenvalue"
    if abs(excess.sum()) > 1e-6 * max(1.0, np.abs(excess).max()):
        yield "its log-rank sums do not add up to 0"


def _rises(answer: TimesAnswer) -> bool:
    """Return whether counts rise with their times, and no time has more events than exits."""
    ends, exits, events = [*answer.ends], [*answer.exits], [*answer.events]
    counts = [*exits, *events, *answer.entries]
    right = all(count >= 0 and count == int(count) for count in counts)
    right &= len(ends) == len(exits) == len(events) <= MOST_ENDS
    right &= len(answer.entries) in (0, len(ends) + 1)
    right &= ends == sorted({*ends}) and all(end >= 0.0 for end in ends)
    right &= all([*of, answer.rows] == sorted([*of, answer.rows]) for of in (exits, answer.entries))
    right &= events == sorted(events)
    return right and all(event <= gone for gone, event in zip(exits, events, strict=True))
