"""What one client answers for a Table 1: counts, means, sds and cumulative counts of its rows.

With `least` above 1, no number rests on fewer rows: counts are multiples of it, 0, or FEW; means and
sds have two digits after the first of the sd; and values are given by ranges of `least` rows or more.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hierfl.core.typed_json import Count, CountOrFew, Number, made_of
from hierfl.formulas.columns import (
    check_column,
    column_of,
    kind_of,
    level_name,
    missing_in,
    named,
    numbers,
)
from hierfl.formulas.disclosure import coarse, singled_out

FEW = -1  # some rows, but fewer than `least`
STEPS = (1.0, 2.0, 5.0)  # times powers of ten: the widths that ranges of values are multiples of
FINE = 10.0  # of such widths in an sd, at most
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class NumbersAnswer:
    """A column of numbers: its rows, mean, sd (n - 1), and how many values are at or below each of `ends`.

    `ones` are the rows with a 1, where all values are 0 or 1; None: there are other values.
    """

    rows: Count
    mean: Number
    sd: Number
    ends: tuple[Number, ...] = ()
    below: tuple[Count, ...] = ()
    ones: Count | None = None


@dataclass(frozen=True)
class LevelsAnswer:
    """A category: its rows, the rows of each level that may be named, and those of the others.

    `declared` is the order of a pandas category: of all its levels with `least` 1, else of those in `counts`.
    """

    rows: Count
    counts: Mapping[str, Count]
    others: CountOrFew = 0
    declared: tuple[str, ...] = ()


@dataclass(frozen=True)
class VariableAnswer:
    """A column of one group of rows: how many miss a value, and the others; none: too few have one, or differ."""

    missing: CountOrFew
    numbers: NumbersAnswer | None = None
    levels: LevelsAnswer | None = None

    @property
    def found(self) -> NumbersAnswer | LevelsAnswer | None:
        """What is known of the rows that have a value."""
        return self.numbers or self.levels


@dataclass(frozen=True)
class TableAnswer:
    """Group -> its rows, and the answer for each column; `left` counts the rows of groups that are too small."""

    rows: Mapping[str, Count]
    groups: Mapping[str, Mapping[str, VariableAnswer]]
    left: CountOrFew = 0


def rounded_count(count: int, least: int) -> int:
    """Return a count as it may leave: the nearest multiple of `least`, or FEW.

    >>> [rounded_count(count, 5) for count in (0, 3, 5, 98)], rounded_count(3, 1)
    ([0, -1, 5, 100], 3)
    """
    if 0 < count < least:
        return FEW
    return least * round(count / least)


def table_answer(
    frame: pd.DataFrame,
    columns: Sequence[str],
    by: str | None,
    client: str,
    least: int,
    complete: Mask | None = None,
) -> TableAnswer:
    """Return a client's answer by the values of a column; the schema revealed sums over `complete` rows."""
    there = np.ones(len(frame), dtype=bool) if complete is None else complete
    large: dict[str, Mask] = {}
    small = np.zeros(len(frame), dtype=bool)
    for name, own in rows_by_group(frame, by, client):
        if own.sum() < least:
            small |= own
        else:
            large[name] = own

    def by_group(column: str) -> dict[str, VariableAnswer]:
        """Return the answers for a column, without groups whose sums would reveal a few rows.

        The schema revealed the sums over all complete rows. Less those of the groups that are described,
        they leave the sums of the others, which must have enough rows too.
        """
        answers, hidden = {}, small.copy()
        for name, own in large.items():
            answers[name] = variable_answer(frame[own], column, client, least, there[own])
            hidden |= own & (answers[name].found is None)
        for name, own in sorted(large.items(), key=lambda item: int(item[1].sum())):
            hidden_rows, of_hidden = frame[hidden & there], there[hidden & there]
            if missing_in(hidden_rows[column]).all():
                break
            if variable_answer(hidden_rows, column, client, least, of_hidden).found is not None:
                break
            answers[name] = VariableAnswer(answers[name].missing)
            hidden |= own
        return answers

    of = {name: by_group(name) for name in columns}
    groups = {name: {column: of[column][name] for column in columns} for name in large}
    rows = {name: rounded_count(int(own.sum()), least) for name, own in large.items()}
    return TableAnswer(rows, groups, rounded_count(int(small.sum()), least))


OTHERS = "(others)"  # levels of too few rows to be named
MISSING = "(missing)"  # the group of rows that miss the value by which they are grouped


def rows_by_group(frame: pd.DataFrame, by: str | None, client: str) -> Iterator[tuple[str, Mask]]:
    """Yield the value of each group of rows, "" of all, and which rows they are, (n,)."""
    names = np.full(len(frame), "", dtype=object)
    if by is not None:
        check_column(frame, by, client)
        names = named(frame[by], by, client).astype(object)
        _refuse_name(MISSING, names, by, client)
        names[names == ""] = MISSING
    for name in dict.fromkeys(names.tolist()):
        yield name, names == name


def variable_answer(
    frame: pd.DataFrame, name: str, client: str, least: int, complete: Mask
) -> VariableAnswer:
    """Return a client's answer for one column of some rows."""
    check_column(frame, name, client)
    series, every = frame[name], np.ones(len(frame), dtype=bool)
    missing = rounded_count(int(missing_in(series).sum()), least)
    there = rows_with(frame, [name], every, complete, least)
    if there.sum() < max(least, 1) or 0 < (there & complete).sum() < least:
        return VariableAnswer(missing)
    kind = pd.api.types.infer_dtype(series[there])
    if kind in ("datetime64", "datetime", "date", "timedelta64", "timedelta", "period"):
        series = series.astype(str)
    elif kind != "boolean" and kind_of(series, name, client) == "number":
        answer = numbers_answer(numbers(series)[there], name, client, least)
        return VariableAnswer(missing, numbers=answer)
    return VariableAnswer(missing, levels=levels_answer(series[there], name, client, least))


def rows_with(
    frame: pd.DataFrame, columns: Sequence[str], of: Mask, complete: Mask, least: int
) -> Mask:
    """Return which rows `of` some have values of columns: without those that others lack, where these are few."""
    there = of & ~np.logical_or.reduce([missing_in(frame[name]) for name in columns])
    # the two sums would differ by a few rows alone
    return there & complete if 0 < (there & ~complete).sum() < least else there


def _refuse_name(reserved: str, names: Any, column: str, client: str) -> None:
    """Refuse a value that has the name of what a table adds."""
    if reserved in names:
        what = f"the value '{reserved}', which is what the table calls other rows"
        raise ValueError(f"{column_of(column, client)} has {what}: rename it")


def levels_answer(series: Any, name: str, client: str, least: int) -> LevelsAnswer:
    """Return the rows of each level that may be named."""
    levels, counts = np.unique(named(series, name, client), return_counts=True)
    _refuse_name(OTHERS, levels, name, client)
    seen = dict(zip(levels.tolist(), map(int, counts), strict=True))
    shown = {level: rounded_count(count, least) for level, count in seen.items() if count >= least}
    others = sum(count for count in seen.values() if count < least)
    declared: tuple[str, ...] = ()
    if hasattr(series, "cat"):
        every = map(level_name, series.cat.categories)
        declared = tuple(level for level in every if least == 1 or level in shown)
    return LevelsAnswer(
        rounded_count(len(series), least), shown, rounded_count(others, least), declared
    )


def numbers_answer(values: Floats, name: str, client: str, least: int) -> NumbersAnswer | None:
    """Return mean, sd and cumulative counts of values; None where few differ from all others."""
    if not np.isfinite(values).all():
        raise ValueError(f"{column_of(name, client)} is infinite: fix the value")
    if len(singled_out(values, least, by_value=False)):
        return None  # they could be solved for
    own = coarse(values, least)
    if not len(own):
        return None
    mean, sd = float(own.mean()), float(own.std(ddof=1)) if len(own) > 1 else 0.0
    if least > 1:
        digits = 2 - math.floor(math.log10(sd)) if sd > 0.0 else 15
        mean, sd = round(mean, digits), round(sd, digits)
    ends, below = cumulative(values, least)
    is_binary = bool(np.isin(values, (0.0, 1.0)).all())
    ones = rounded_count(int(values.sum()), least) if is_binary else None
    return NumbersAnswer(rounded_count(len(values), least), mean, sd, ends, below, ones)


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
            below.append(rounded_count(upto, least))
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
    rounded: Floats = np.round(np.ceil(values / step - 1e-9) * step, digits) + 0.0  # no -0
    return rounded


# ------------------------------------------------------------ as JSON, of a node that may lie
MOST_LEVELS, MOST_ENDS = 1000, 10_000


def table_from_json(document: Any, columns: Collection[str], least: int) -> TableAnswer:
    """Return the answer of some JSON that `table_answer` was written as, or raise ValueError."""
    made: TableAnswer = made_of(TableAnswer, document)
    if fault := next(_faults_of_table(made, columns, least), ""):
        raise ValueError(fault)
    return made


def _faults_of_table(made: TableAnswer, columns: Collection[str], least: int) -> Iterator[str]:
    yield from faults_of_names({*made.rows, *made.groups}, MOST_LEVELS)
    if made.rows.keys() != made.groups.keys():
        yield "its groups are not those of its rows"
    for group, answers in made.groups.items():
        if answers.keys() != {*columns}:
            yield "it tells of other columns than were asked for"
        for variable in answers.values():
            yield from _faults_of_variable(variable, made.rows[group], least)


def _faults_of_variable(variable: VariableAnswer, rows: int, least: int) -> Iterator[str]:
    answer = variable.found
    if variable.numbers and variable.levels:
        yield "a column is both of numbers and of levels"
    if answer is None:
        return
    counts = [rows, answer.rows]
    # each is rounded, and FEW stands for less than `least`
    if abs(answer.rows + max(variable.missing, 0) - rows) > 2 * least:
        yield "its rows with a value, and without one, are not those of its group"
    if isinstance(answer, LevelsAnswer):
        yield from faults_of_names({*answer.counts, *answer.declared}, MOST_LEVELS)
        counts += answer.counts.values()
        every = sum(answer.counts.values()) + max(answer.others, 0)
        if abs(every - answer.rows) > least * (len(answer.counts) + 3) / 2:
            yield "the rows of its levels are not those of its column"
        if answer.declared and {*answer.declared} != {*answer.counts}:
            yield "the order of its levels is of other levels"
    else:
        yield from _faults_of_numbers(answer, least)
    if any(count < least or count % least for count in counts):
        yield "its counts are not rounded, or of few rows"


def _faults_of_numbers(answer: NumbersAnswer, least: int) -> Iterator[str]:
    """Yield why no values have these counts, mean and sd: P(x > end) <= sd^2 / (sd^2 + (end - mean)^2)."""
    ends, below = np.array(answer.ends), np.array(answer.below)
    if len(ends) != len(below) or len(ends) > MOST_ENDS or answer.sd < 0.0:
        yield "its ends of ranges are not as many as its counts, or its sd is below 0"
        return
    rise = np.diff([least, *answer.below, answer.rows]) >= 0
    if (np.diff(ends) <= 0.0).any() or not rise.all():
        yield "its counts do not rise with its values"
    at_ends = np.where(ends < answer.mean, below, answer.rows - below) - least / 2.0
    apart, rounding = ends - answer.mean, 1e-9 * np.abs(ends) + answer.sd / FINE
    apart = np.maximum(np.abs(apart) - 3.0 * rounding, 0.0)
    if (at_ends * (answer.sd**2 + apart**2) > 1.5 * answer.sd**2 * answer.rows).any():
        yield "its counts are none of values with this mean and sd"
    if answer.ones is None:
        return
    if answer.ones > answer.rows or not {*answer.ends} <= {0.0, 1.0}:
        yield "it counts ones of a column that has other values"
    if abs(answer.ones - answer.mean * answer.rows) > 2.0 * least:
        yield "its ones are not those of its mean"


def faults_of_names(names: Collection[str], limit: int) -> Iterator[str]:
    """Yield why names of groups or levels are too many, or cannot be printed."""
    if len(names) > limit:
        yield f"it names more than {limit} groups or levels"
    for name in names:
        if len(name) > 200 or not name.isprintable():
            yield f"a group or level is named {name[:40]!r}"
