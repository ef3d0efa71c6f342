"""What one client answers about times: cumulative events and exits, and its own log-rank sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hierfl.core.typed_json import Count, CountOrFew, Number, made_of
from hierfl.formulas.columns import CENSORED, level_name, named, numbers
from hierfl.formulas.parse import Declaration
from hierfl.formulas.table_answers import (
    MOST_ENDS,
    check_names,
    on_grid,
    rounded_count,
    rows_by_group,
)

Floats = NDArray[np.float64]
MOST_GROUPS = 50


@dataclass(frozen=True)
class TimesAnswer:
    """Rows of a group; how many had left, by an event or censored, and had an event, by each of `ends`.

    With `least` 1 these are the client's distinct times. Above 1, so many leave between two of them, and
    events are rounded to multiples of it.
    """

    rows: Count
    ends: tuple[Number, ...]
    exits: tuple[Count, ...]
    events: tuple[Count, ...]


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


def times_and_events(
    frame: pd.DataFrame, declared: Declaration, client: str
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return times, and whether each ended in an event; refuse what no Kaplan-Meier curve is of."""
    response, additions = declared.parts.response, declared.parts.additions
    if others := sorted(additions.keys() - {"event", "cens"}):
        raise ValueError(
            f"'{response}' has {others[0]}({additions[others[0]]}), of which no Kaplan-Meier curve is "
            "made: times may be censored on the right alone, event(status) or cens(status)"
        )
    times, events = numbers(frame[response]), np.ones(len(frame), dtype=bool)
    if not (np.isfinite(times) & (times > 0.0)).all():
        raise ValueError(f"times '{response}' of client '{client}' must be finite and above 0")
    if "event" in additions:
        status = numbers(frame[additions["event"]])
        if not np.isin(status, (0.0, 1.0)).all():
            raise ValueError(f"column '{additions['event']}' of client '{client}' must be 0 or 1")
        events = status == 1.0
    elif "cens" in additions:
        words = [level_name(value) for value in frame[additions["cens"]]]
        codes = [CENSORED.get(word, word) for word in words]
        if not {*map(str, codes)} <= {"0", "1"}:
            raise ValueError(
                f"column '{additions['cens']}' of client '{client}' must be 0 (none) or 1 (right)"
            )
        events = np.array([str(code) == "0" for code in codes])
    return times, events


def survival_answer(
    frame: pd.DataFrame, declared: Declaration, by: str | None, client: str, least: int
) -> SurvivalAnswer:
    """Return a client's answer about its times, by the values of a column."""
    times, events = times_and_events(frame, declared, client)
    parts = sorted(rows_by_group(frame, by, client), key=lambda one: (int(one[1].sum()), one[0]))
    groups, left = {}, 0
    for name, own in parts:
        # a difference from all rows, whose number is known, would reveal a small group
        few = own.sum() < least or 0 < events[own].sum() < least or 0 < left < least
        left += int(own.sum()) if few else 0
        if not few:
            groups[name] = times_answer(times[own], events[own], least)
    names = np.full(len(frame), "", dtype=np.str_) if by is None else named(frame[by], by, client)
    there = np.isin(names, list(groups))
    logrank = client_logrank(times[there], events[there], names[there], least)
    return SurvivalAnswer(groups, logrank, rounded_count(left, least))


def times_answer(times: Floats, events: NDArray[np.bool_], least: int) -> TimesAnswer:
    """Return cumulative exits and events at the ends of ranges in which `least` rows or more leave."""
    at = times if least == 1 else on_grid(times)
    ends, place, leave = np.unique(at, return_inverse=True, return_counts=True)
    exits = leave.cumsum()
    happened = np.bincount(place, weights=events, minlength=len(ends)).astype(int).cumsum()
    kept, before = [], 0
    for k, upto in enumerate(exits.tolist()):
        if upto - before >= least and len(times) - upto >= (least if least > 1 else 0):
            kept.append(k)
            before = upto
    cells = [(int(exits[k]), least * round(int(happened[k]) / least)) for k in kept]
    return TimesAnswer(
        len(times),
        tuple(float(ends[k]) for k in kept),
        tuple(gone for gone, _ in cells),
        tuple(min(event, gone) for gone, event in cells),
    )


def client_logrank(times: Floats, events: Any, names: Any, least: int) -> LogrankSums | None:
    """Return a client's log-rank sums; None where it has fewer than two groups, or too few events.

    O - E of each group, and its hypergeometric covariance (Mantel 1966), summed over the times. With
    `least` above 1 the sums are of a table of ranges of times, whose counts are multiples of it.
    """
    groups = sorted(set(names.tolist()))
    if len(groups) < 2 or events.sum() < least:
        return None
    risk, happened = at_risk(times, events, names, groups)
    if least > 1:
        risk, happened = _coarse(risk, happened, least)
    if not len(risk):
        return None
    excess, covariance = logrank_sums(risk, happened)
    if least > 1:  # of counts that are rounded to multiples of it
        covariance = covariance + least**2 / 12.0 * (np.eye(len(groups)) - 1.0 / len(groups))
    rows = tuple(tuple(map(float, row)) for row in covariance)
    return LogrankSums(tuple(groups), tuple(map(float, excess)), rows)


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


def at_risk(times: Floats, events: Any, names: Any, groups: Sequence[str]) -> tuple[Floats, Floats]:
    """Return rows at risk and events at each time of an event, (T, G) both."""
    when = np.unique(times[events])
    risk, happened = np.zeros((len(when), len(groups))), np.zeros((len(when), len(groups)))
    for k, group in enumerate(groups):
        own = names == group
        risk[:, k] = own.sum() - np.searchsorted(np.sort(times[own]), when, side="left")
        of = np.sort(times[own & events])
        happened[:, k] = np.searchsorted(of, when, "right") - np.searchsorted(of, when, "left")
    return risk, happened


def logrank_sums(risk: Floats, happened: Floats) -> tuple[Floats, Floats]:
    """Return the sums over times of observed less expected events, (G,), and of their covariances, (G, G)."""
    n, d = risk.sum(1), happened.sum(1)
    share = risk / n[:, None]
    excess: Floats = (happened - d[:, None] * share).sum(0)
    spread = np.where(n > 1.0, d * (n - d) / np.maximum(n - 1.0, 1.0), 0.0)
    apart = np.eye(risk.shape[1]) * share[:, :, None] - share[:, :, None] * share[:, None, :]
    covariance: Floats = (spread[:, None, None] * apart).sum(0)
    return excess, covariance


# ------------------------------------------------------------ as JSON, of a node that may lie
def survival_from_json(found: Any) -> SurvivalAnswer:
    """Return the answer of some JSON that `survival_answer` was written as, or raise ValueError."""
    made: SurvivalAnswer = made_of(SurvivalAnswer, found)
    check_names({*made.groups}, MOST_GROUPS)
    for times in made.groups.values():
        _check_times(times)
    if made.logrank is not None:
        _check_logrank(made.logrank, {*made.groups})
    return made


def _check_times(found: TimesAnswer) -> None:
    ends, exits, events = [*found.ends], [*found.exits], [*found.events]
    right = len(ends) == len(exits) == len(events) <= MOST_ENDS
    right &= ends == sorted({*ends}) and all(end > 0.0 for end in ends)
    right &= [*exits, found.rows] == sorted([*exits, found.rows]) and events == sorted(events)
    right &= all(event <= gone for gone, event in zip(exits, events, strict=False))
    if not right:
        raise ValueError("its counts do not rise with its times, or it has more events than exits")


def _check_logrank(found: LogrankSums, groups: set[str]) -> None:
    sizes = {len(found.groups), len(found.excess), len(found.covariance)}
    sizes |= {*map(len, found.covariance)}
    names = {*found.groups}
    if len(sizes) > 1 or not names or not names <= groups or len(names) < len(found.groups):
        raise ValueError("its log-rank sums are of other groups")
    least = np.linalg.eigvalsh(np.array(found.covariance)).min()
    if not least > -1e-3 * max(map(abs, np.ravel(found.covariance)), default=0.0):
        raise ValueError("its log-rank covariance has a negative eigenvalue")
