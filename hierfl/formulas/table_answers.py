"""What one client answers for a Table 1: counts, means, sds and cumulative counts of its rows.

With `least` above 1, no number rests on fewer rows: counts are multiples of it, 0, or FEW; means and
sds have two digits after the first of the sd; and values are told in ranges of `least` rows or more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hierfl.formulas.columns import check_column, kind_of, missing_in, named, numbers

FEW = -1  # rows, but fewer than may be told
STEPS = (1.0, 2.0, 5.0)  # times powers of ten: the widths that ranges of values are multiples of
FINE = 10.0  # of such widths in an sd, at most
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class OfNumbers:
    """A column of numbers: its rows, mean, sd (n - 1), and how many values are at or below each of `ends`."""

    rows: int
    mean: float
    sd: float
    ends: tuple[float, ...] = ()
    below: tuple[int, ...] = ()


@dataclass(frozen=True)
class OfLevels:
    """A category: its rows, the rows of each level that may be named, and those of the others."""

    rows: int
    counts: Mapping[str, int]
    others: int = 0
    declared: tuple[str, ...] = ()


@dataclass(frozen=True)
class OfVariable:
    """A column of one group of rows: how many miss a value; None: too few rows have one, or differ."""

    missing: int
    found: OfNumbers | OfLevels | None


@dataclass(frozen=True)
class OfTable:
    """Group -> its rows, and column -> what is told of it; rows of groups that are too small are `left`."""

    rows: Mapping[str, int]
    groups: Mapping[str, Mapping[str, OfVariable]]
    left: int = 0


def told(count: int, least: int) -> int:
    """Return a count as it may be told: the nearest multiple of `least`, or FEW.

    >>> [told(count, 5) for count in (0, 3, 5, 98)], told(3, 1)
    ([0, -1, 5, 100], 3)
    """
    if 0 < count < least:
        return FEW
    return least * round(count / least)


def of_table(
    frame: pd.DataFrame,
    columns: Sequence[str],
    by: str | None,
    client: str,
    least: int,
    complete: Mask | None = None,
) -> OfTable:
    """Return what a client tells of its columns, by the values of one; sums over `complete` rows were told before."""
    there = np.ones(len(frame), dtype=bool) if complete is None else complete
    large: dict[str, Mask] = {}
    left = np.zeros(len(frame), dtype=bool)
    for name, own in of_groups(frame, by, client):
        if own.sum() < least:
            left |= own
        else:
            large[name] = own
    of = {column: _by_group(frame, column, large, left, client, least, there) for column in columns}
    groups = {name: {column: of[column][name] for column in columns} for name in large}
    rows = {name: told(int(own.sum()), least) for name, own in large.items()}
    return OfTable(rows, groups, told(int(left.sum()), least))


def _by_group(
    frame: pd.DataFrame,
    column: str,
    groups: Mapping[str, Mask],
    left: Mask,
    client: str,
    least: int,
    complete: Mask,
) -> dict[str, OfVariable]:
    """Return what is told of a column by group: not of all groups but some of few rows.

    The sums over all rows were told before: less those of all other groups they would tell of the few.
    """
    found = {
        name: of_variable(frame[own], column, client, least, complete[own])
        for name, own in groups.items()
    }
    untold = left.copy()
    for name, own in groups.items():
        untold |= own & (found[name].found is None)
    for name, own in sorted(groups.items(), key=lambda one: int(one[1].sum())):
        few, there = frame[untold & complete], complete[untold & complete]
        if missing_in(few[column]).all():
            break
        if of_variable(few, column, client, least, there).found is not None:
            break
        found[name] = OfVariable(found[name].missing, None)
        untold |= own
    return found


MISSING = "(missing)"  # the group of rows that miss the value by which they are grouped


def of_groups(frame: pd.DataFrame, by: str | None, client: str) -> Iterator[tuple[str, Mask]]:
    """Yield the value of each group of rows, "" of all, and which rows they are, (n,)."""
    names = np.full(len(frame), "", dtype=object)
    if by is not None:
        check_column(frame, by, client)
        names = named(frame[by], by, client).astype(object)
        names[names == ""] = MISSING
    for name in dict.fromkeys(names.tolist()):
        yield name, names == name


def of_variable(
    frame: pd.DataFrame, name: str, client: str, least: int, complete: Mask
) -> OfVariable:
    """Return what a client tells of one column of some rows."""
    check_column(frame, name, client)
    series, lost = frame[name], missing_in(frame[name])
    missing, there = told(int(lost.sum()), least), ~lost
    if 0 < (there & ~complete).sum() < least:
        there = there & complete  # sums over both would tell of the few rows between them
    if there.sum() < max(least, 1) or 0 < (there & complete).sum() < least:
        return OfVariable(missing, None)
    is_yes_no = pd.api.types.infer_dtype(series[there]) == "boolean"
    if kind_of(series, name, client) == "number" and not is_yes_no:
        return OfVariable(missing, of_numbers(numbers(series)[there], name, client, least))
    return OfVariable(missing, of_levels(series[there], name, client, least))


def of_levels(series: Any, name: str, client: str, least: int) -> OfLevels:
    """Return the rows of each level that may be named."""
    levels, counts = np.unique(named(series, name, client), return_counts=True)
    seen = dict(zip(levels.tolist(), map(int, counts), strict=True))
    shown = {level: told(count, least) for level, count in seen.items() if count >= least}
    others = sum(count for count in seen.values() if count < least)
    declared: tuple[str, ...] = ()
    if hasattr(series, "cat"):
        declared = tuple(str(v) for v in series.cat.categories if str(v) in shown)
    return OfLevels(told(len(series), least), shown, told(others, least), declared)


def of_numbers(values: Floats, name: str, client: str, least: int) -> OfNumbers | None:
    """Return mean, sd and cumulative counts of values; None where few differ from all others."""
    if not np.isfinite(values).all():
        raise ValueError(f"column '{name}' of client '{client}' is infinite: fix the value")
    if 0 < len(values) - np.unique(values, return_counts=True)[1].max() < least:
        return None  # they could be solved for
    mean, sd = float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0
    if least > 1:
        digits = 2 - math.floor(math.log10(sd)) if sd > 0.0 else 15
        mean, sd = round(mean, digits), round(sd, digits)
    ends, below = cumulative(values, least)
    return OfNumbers(told(len(values), least), mean, sd, ends, below)


def cumulative(values: Floats, least: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return ends of ranges of `least` values or more, and how many values are at or below each.

    The first range has no lower end and the last no upper one, so that no end is the least or the
    largest value.
    """
    at, counts = np.unique(values if least == 1 else on_grid(values), return_counts=True)
    sums = counts.cumsum()
    if least == 1:
        return tuple(map(float, at)), tuple(map(int, sums))
    ends, below, before = [], [], 0
    for end, upto in zip(at.tolist(), sums.tolist(), strict=True):
        if upto - before >= least and sums[-1] - upto >= least:
            ends.append(end)
            below.append(told(upto, least))
            before = upto
    return tuple(ends), tuple(below)


def on_grid(values: Floats) -> Floats:
    """Return values, rounded up to multiples of a tenth of their sd or a little more (1, 2 or 5 times 10^k)."""
    sd = float(values.std())
    if sd == 0.0:
        return values
    power = 10.0 ** math.floor(math.log10(sd / FINE))
    step = next(s * power for s in (*STEPS, 10.0) if s * power >= 0.999999 * sd / FINE)
    digits = max(0, 1 - math.floor(math.log10(step)))
    found: Floats = np.round(np.ceil(values / step - 1e-9) * step, digits) + 0.0  # no -0
    return found


# ------------------------------------------------------------ as JSON, of a node that may lie
MOST_LEVELS, MOST_ENDS = 1000, 10_000


def table_of_json(found: Any, columns: Collection[str]) -> OfTable:
    """Return the answer of some JSON that `of_table` was written as, or raise ValueError."""
    try:
        groups = {
            group_name(group): {name: _variable(parts[name]) for name in columns}
            for group, parts in _few(found["groups"]).items()
        }
        rows = {group_name(group): whole(count) for group, count in _few(found["rows"]).items()}
        if rows.keys() != groups.keys():
            raise ValueError("its groups are not those of its rows")
        return OfTable(rows, groups, whole(found["left"], few=True))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"it is no table ({type(error).__name__}: {error})"[:300]) from error


def _variable(found: Any) -> OfVariable:
    missing, of = whole(found["missing"], few=True), found["found"]
    if of is None:
        return OfVariable(missing, None)
    if "counts" in of:
        counts = {group_name(level): whole(n) for level, n in _few(of["counts"]).items()}
        declared = tuple(map(group_name, of["declared"]))
        if declared and {*declared} != {*counts}:
            raise ValueError("the order of its levels is of other levels")
        return OfVariable(
            missing, OfLevels(whole(of["rows"]), counts, whole(of["others"], few=True), declared)
        )
    ends, below = tuple(map(finite, of["ends"])), tuple(map(whole, of["below"]))
    rows, sd = whole(of["rows"]), finite(of["sd"])
    right = len(ends) == len(below) <= MOST_ENDS
    right &= list(ends) == sorted(set(ends)) and [*below, rows] == sorted([*below, rows])
    if not right or sd < 0.0:
        raise ValueError("its counts do not rise with its values, or its sd is below 0")
    return OfVariable(missing, OfNumbers(rows, finite(of["mean"]), sd, ends, below))


def whole(found: Any, *, few: bool = False) -> int:
    """Return a count, or with `few` also FEW; refuse anything else."""
    if type(found) is int and (0 <= found < 1 << 40 or (few and found == FEW)):
        return found
    raise ValueError(f"{str(found)[:40]} is no count")


def finite(found: Any) -> float:
    """Return a number of at most 1e15; refuse anything else."""
    if type(found) in (int, float) and abs(found) <= 1e15:
        return float(found)
    raise ValueError(f"{str(found)[:40]} is no number")


def _few(found: Any) -> Mapping[str, Any]:
    if not isinstance(found, dict) or len(found) > MOST_LEVELS:
        raise ValueError(f"it names more than {MOST_LEVELS} groups or levels, or none")
    return found


def group_name(found: Any) -> str:
    """Return the name of a group or level; refuse what cannot be printed."""
    if not isinstance(found, str) or len(found) > 200 or not found.isprintable():
        raise ValueError(f"a group or level is named {str(found)[:40]!r}")
    return found
