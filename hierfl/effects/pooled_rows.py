"""Clients' answers about their rows, added up: means, sds, quantiles and their bounds, shares of levels."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hierfl.formulas.columns import level_name, ordered, refuse_similar
from hierfl.formulas.levels import is_identifier, merged
from hierfl.formulas.table_answers import MISSING, OTHERS, LevelsAnswer, NumbersAnswer

MANY_LEVELS = 50  # beyond which a table counts the levels of a category instead of listing them
DIFFERENT = "(different values)"  # in place of many levels
QUARTILES = {"q25": 0.25, "median": 0.5, "q75": 0.75}
Floats = NDArray[np.float64]
ColumnAnswer = NumbersAnswer | LevelsAnswer


class Form(NamedTuple):
    """What a column of a table is: numbers, levels in their order, or what is counted and not listed."""

    kind: Literal["numbers", "levels", "counted"]
    levels: tuple[str, ...] = ()


def form_of(column: str, answers: Sequence[ColumnAnswer], least: int) -> Form:
    """Return the form of a column in all groups: 0 and 1 are levels; many levels are counted."""
    are_levels = {isinstance(answer, LevelsAnswer) for answer in answers}
    if len(are_levels) > 1:
        what = f"column '{column}' holds numbers at one client and names at another"
        raise ValueError(f"{what}: make it the same everywhere, or leave it out by columns=")
    if True not in are_levels and not _are_binary(answers, least):
        return Form("numbers")
    levels = [as_levels(answer) for answer in answers]
    seen = {level for answer in levels for level in answer.counts}
    refuse_similar(seen, f"column '{column}'")
    rows = sum(answer.rows for answer in levels)
    if least == 1 and (len(seen) > MANY_LEVELS or is_identifier(len(seen), rows)):
        return Form("counted")
    orders = {answer.declared for answer in levels if answer.declared}
    order = merged(orders) or (max(orders, key=len) if orders else ())
    return Form("levels", tuple(dict.fromkeys((*order, *ordered(seen)))))


def order_of_groups(names: Iterable[str], frames: Iterable[Any], by: str) -> tuple[str, ...]:
    """Return groups in the order of a pandas category, of the `frames` that have one, else in their own."""
    known, columns = {*names}, [frame[by] for frame in frames]
    orders = {tuple(map(level_name, of.cat.categories)) for of in columns if hasattr(of, "cat")}
    every = (*(merged(orders) or ()), *ordered(known - {MISSING}), MISSING)
    return tuple(name for name in dict.fromkeys(every) if name in known)


def _are_binary(answers: Sequence[ColumnAnswer], least: int) -> bool:
    """Return whether numbers are all 0 or 1; both occur, where a client may have hidden other values."""
    ones = [None if isinstance(answer, LevelsAnswer) else answer.ones for answer in answers]
    if not ones or None in ones:
        return False
    return least == 1 or 0 < sum(count or 0 for count in ones) < sum(of.rows for of in answers)


def as_levels(answer: ColumnAnswer) -> LevelsAnswer:
    """Return numbers that are all 0 or 1 as two levels, and levels as they are."""
    if isinstance(answer, LevelsAnswer):
        return answer
    ones = answer.ones or 0
    return LevelsAnswer(answer.rows, {"0": answer.rows - ones, "1": ones})


def _values_of(answer: ColumnAnswer) -> Floats:
    """Return all values of numbers, (n,); of an answer with a `least` of 1."""
    if isinstance(answer, LevelsAnswer):
        return np.zeros(0)
    return np.repeat(answer.ends, np.diff([0, *answer.below]))


def pooled_levels(
    levels: Sequence[str], answers: Sequence[LevelsAnswer], about: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return a row per level: how many rows have it, and their share; 0 unless it is among those not named."""
    hidden = [answer.others for answer in answers if answer.others]
    lines = []
    for level in levels:
        count = sum(answer.counts.get(level, 0) for answer in answers)
        if count or not hidden:
            lines.append({**about, "level": level, "count": count})
    if hidden:
        count = min(hidden) if min(hidden) < 0 else sum(hidden)
        lines.append({**about, "level": OTHERS, "count": count})
    for line in lines:
        is_known = line["count"] >= 0 and about["n"]
        line["share"] = line["count"] / about["n"] if is_known else math.nan
    return lines


def counted(answers: Sequence[ColumnAnswer], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return one row for a column of many levels, such as IDs: how many different values it has."""
    names = {
        level for answer in answers if isinstance(answer, LevelsAnswer) for level in answer.counts
    }
    numbers = {value for answer in answers for value in _values_of(answer).tolist()}
    return {**about, "level": DIFFERENT, "count": len(names | numbers), "share": math.nan}


def pooled_numbers(answers: Sequence[NumbersAnswer], least: int) -> dict[str, float]:
    """Return mean, sd and quartiles of all clients' values, with bounds of the quartiles."""
    rows = np.array([answer.rows for answer in answers], dtype=np.float64)
    total = rows.sum()
    if not total:
        return {}
    means, sds = (np.array([getattr(answer, of) for answer in answers]) for of in ("mean", "sd"))
    mean = float(rows @ means / total)
    squares = (rows - 1.0) @ sds**2 + rows @ (means - mean) ** 2
    summary = {"mean": mean, "sd": math.sqrt(squares / (total - 1.0)) if total > 1.0 else math.nan}
    for name, share in QUARTILES.items():
        if least == 1:  # all values are known
            at = (float(np.quantile(np.concatenate([*map(_values_of, answers)]), share)),) * 3
        else:
            at = _bounded(answers, share, least)
        summary |= dict(zip((name, f"{name}_low", f"{name}_high"), at, strict=True))
    return summary


# ------------------------------------------------------------ quantiles
def _bounded(
    answers: Sequence[NumbersAnswer], share: float, least: int
) -> tuple[float, float, float]:
    """Return a quantile by interpolation, and the ends between which it lies whatever the values are."""
    points = np.array(sorted({end for answer in answers for end in answer.ends}))
    if not len(points):
        return math.nan, -math.inf, math.inf
    middle, low, high = np.zeros(len(points)), np.zeros(len(points)), np.zeros(len(points))
    for answer in answers:
        below = np.array([0, *answer.below, answer.rows], dtype=np.float64)
        outside = 0.5 * (below[:-1] + below[1:])  # the middle of the open ranges
        inside = {"left": outside[0], "right": outside[-1]}
        middle += (
            np.interp(points, answer.ends, answer.below, **inside) if answer.ends else outside[0]
        )
        low += below[np.searchsorted(answer.ends, points, side="right")]
        high += below[np.searchsorted(answer.ends, points, side="left") + 1]
    rank = share * sum(answer.rows for answer in answers)
    slack = 0.5 * least * len(answers)  # by which counts are rounded
    upper = points[low - slack >= rank + share * slack]
    lower = points[high + slack < rank - share * slack]
    ends = float(lower.max(initial=-math.inf)), float(upper.min(initial=math.inf))
    at = float(np.interp(rank, middle, points)) if np.isfinite(ends).all() else math.nan
    return at, *ends
