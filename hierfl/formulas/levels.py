"""The levels of a category, as clients' answers give them: their order, rare and unused ones, and what is none."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hierfl.core.user_warnings import warn
from hierfl.data.frames import is_number
from hierfl.formulas.answers import OfColumn
from hierfl.formulas.columns import Column, moments, ordered, refuse_similar
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.expressions import Name
from hierfl.formulas.questions import Ask, Question
from hierfl.formulas.schema import Schema

Rare = Literal["refuse", "merge"]
OTHER = "other"  # the level that rare ones are merged into


def merged(orders: Iterable[Sequence[str]]) -> tuple[str, ...] | None:
    """Return the one order of all levels that some orders of part of them allow; None: they contradict.

    Levels that no order compares stand as in `ordered`.

    >>> merged([("low", "high"), ("low", "mid"), ("mid", "high")])
    ('low', 'mid', 'high')
    """
    before: dict[str, set[str]] = {}
    for order in orders:
        for low, level in pairwise(("", *order)):
            before.setdefault(level, set()).update({low} - {""})
    rank = {level: place for place, level in enumerate(ordered(before))}
    sorter, levels = TopologicalSorter(before), list[str]()
    try:
        sorter.prepare()
    except CycleError:
        return None
    ready = sorted(sorter.get_ready(), key=rank.__getitem__)
    while ready:
        levels.append(ready.pop(0))
        sorter.done(levels[-1])
        ready = sorted((*ready, *sorter.get_ready()), key=rank.__getitem__)
    return tuple(levels)


def levels_of(answers: list[OfColumn], name: str, *, whole: bool) -> tuple[str, ...]:
    """Return the levels in declared, numerical or alphabetical order; `whole` keeps declared ones without rows."""
    seen: set[str] = {level for answer in answers for level in (answer.counts or {})}
    refuse_similar(seen, f"column '{name}'")
    orders = sorted({answer.declared for answer in answers if answer.is_ordered})
    how = f"schema(..., levels={{'{name}': [...]}})"
    if len(orders) > 1:
        pair = f"{', '.join(orders[0])} at one client and {', '.join(orders[1])} at another"
        raise ValueError(f"column '{name}' has the levels {pair}: give all the same, or {how}")
    if whole and not orders and not all(is_number(n) or n in ("False", "True") for n in seen):
        what = f"the levels {', '.join(ordered(seen)[:4])} of the ordinal column '{name}' have no order"
        fix = f"make it numbers, an ordered category, or {how} from the lowest on"
        raise ValueError(f"{what}: {fix}")
    if orders:
        return tuple(level for level in orders[0] if level in seen or whole)
    return ordered(seen) if whole else _listed(answers, name, seen)


def _listed(answers: Collection[OfColumn], name: str, seen: Collection[str]) -> tuple[str, ...]:
    """Return levels as unordered categories list them, then others; an alphabetical list is no choice."""
    lists = {answer.declared for answer in answers} - {()}
    chosen = {levels for levels in lists if levels != ordered(levels)}
    order = merged(chosen)
    if order is None:
        first, other = sorted(chosen)[:2]
        warn(
            f"column '{name}' lists its levels as {', '.join(first)} at one client and as "
            f"{', '.join(other)} at another: the first in alphabetical order is the reference, "
            f"unless schema(..., levels={{'{name}': [...]}}) names another"
        )
        order = ()
    return tuple(level for level in dict.fromkeys((*order, *ordered(seen))) if level in seen)


def value_kind(answer: OfColumn) -> str:
    """Return "True or False" or "names", whichever alone the levels of a column are; "" of both or none."""
    are_boolean = {level in ("False", "True") for level in answer.counts or {}}
    if len(are_boolean) != 1:
        return ""
    return "True or False" if are_boolean.pop() else "names"


def agreed_column(
    name: str,
    answers: Mapping[str, OfColumn],
    levels: tuple[str, ...] | None,
    unit: str,
    ordinal: Collection[str],
) -> Column:
    """Return what clients agree on about one column; levels and unit may be known beforehand."""
    first, fault = next(iter(answers)), ""
    kinds = {answer.kind: client for client, answer in reversed([*answers.items()])}
    held = {value_kind(answer): client for client, answer in answers.items()}
    held.pop("", None)
    units = {unit: "the declaration"} if unit else {}
    for client, answer in answers.items():
        if answer.unit:
            units.setdefault(answer.unit, client)
    if len(kinds) > 1:
        words = {"number": "numbers", "category": "names"}
        here, other = sorted(kinds.items(), key=lambda item: item[1] != first)
        what = f"{words[here[0]]} at client '{first}' and {words[other[0]]} at client '{other[1]}'"
        fault = f"holds {what}: make it the same everywhere, or write C({name})"
    elif len(held) > 1:
        (what_here, at), (what_there, elsewhere) = held.items()
        what = f"{what_here} at client '{at}' and {what_there} at client '{elsewhere}'"
        fault = f"holds {what}: make it the same everywhere"
    elif len(units) > 1:
        (unit_here, at), (unit_there, elsewhere) = list(units.items())[:2]
        what = f"{unit_here} at '{at}' and in {unit_there} at '{elsewhere}'"
        fault = f"is in {what}: convert one of them"
    if fault:
        raise ValueError(f"column '{name}' {fault}")
    unit = next(iter(units), "")
    if answers[first].kind == "category":
        if levels is None:
            levels = levels_of(list(answers.values()), name, whole=name in ordinal)
        return Column("category", unit, levels=levels)
    return Column("number", unit, *moments([of.sums for of in answers.values() if of.sums]))


# ------------------------------------------------------------ what is no level, and what has no rows
def two_levels(declared: Declaration, column: Column) -> Column:
    """Return a response of yes and no with its two levels; refuse others."""
    is_pair, kind, fault = len(column.levels) == 2, declared.family.kind, ""
    if kind == "category" and is_pair:
        pair = " and ".join(column.levels)
        fault = f"the response has two levels, {pair}: use family='bernoulli'"
    elif kind != "binary" or is_pair:
        return column
    elif set(column.levels) <= {"False", "True"}:
        return replace(column, levels=("False", "True"))
    name, levels = declared.parts.response, ", ".join(column.levels[:4])
    fix = f"agree on them, schema(..., levels={{'{name}': ['no', 'yes']}}), or make it 0 and 1"
    raise ValueError(fault or f"the response '{name}' has the levels {levels}, and not two: {fix}")


def with_rare(
    name: str, column: Column, ask: Ask, rare: Rare, least: int, is_ordinal: bool
) -> Column:
    """Return a category with a level for rare values, or refuse them."""
    outside = ask(Question("outside", by=(name,), levels=column.levels))
    lacking = [client for client, rows in outside.items() if rows]
    if not lacking:
        return column
    if rare == "merge" and not is_ordinal:
        others = (level for level in column.levels if level != OTHER)
        return replace(column, levels=(*others, OTHER), rare=OTHER)
    why = f"values that are not among the levels {', '.join(column.levels)}"
    if least > 1:
        why = f"values that no client has in {least} rows" + "; and they are ordered" * is_ordinal
    how = f"agree on all beforehand, schema(..., levels={{'{name}': [...]}})"
    how += "" if is_ordinal else ", or merge them, rare='merge'"
    if not column.levels:
        why, how = f"no value that {least} rows share, like an ID or a date", "take it out"
    raise ValueError(f"column '{name}' of client '{lacking[0]}' has {why}: {how}")


# ------------------------------------------------------------ columns that are no predictors
Floats = NDArray[np.float64]
SOME = 10  # levels or rows, from which on as many values as rows are names of the rows


def is_identifier(levels: int, rows: int) -> bool:
    """Return whether a category names its rows, as an ID or a date does, rather than kinds of rows.

    >>> is_identifier(448, 448), is_identifier(12, 448), is_identifier(4, 4)
    (True, False, False)
    """
    return levels >= SOME and 2 * levels > rows


def refuse_identifier(name: str, answers: Collection[OfColumn]) -> None:
    """Refuse a category that names rows, such as an ID: it would have a coefficient for each."""
    levels = {level for answer in answers for level in (answer.counts or {})}
    rows = sum(sum((answer.counts or {}).values()) for answer in answers)
    if is_identifier(len(levels), rows):
        what = f"column '{name}' has {len(levels)} levels in {rows} rows, like an ID"
        fix = f"take it out, or write (1 | {name}) if several rows share a value"
        raise ValueError(f"{what}, each with a coefficient: {fix}")


FAR = 8.0  # sds of the other rows, from their mean
# of a client's values above 0, if none is below it, whose logarithms must be far out too
FAR_LOGS = 5.0
FAR_ORIGIN = 10.0  # sds from 0 to the mean of a column in a product
SOME_ROWS = 10  # of a client, which tell of two values, and of a long tail


def warn_of_far_values(
    columns: Mapping[str, Floats], schema: Schema, clients: Sequence[str], counts: NDArray[np.int64]
) -> None:
    """Warn of numbers of clients' rows, one client after another, that are far from all, without their values."""
    owner = np.repeat(np.arange(len(clients)), counts)
    for name, every in sorted(columns.items()):
        column = schema.columns[name]
        far_rows = is_far(every, column.mean, column.sd, schema.rows, FAR)
        for place in np.unique(owner[far_rows]).tolist():
            values = every[owner == place]
            values = values[~np.isnan(values)]
            is_binary = math.isclose(column.sd**2 + column.mean**2, column.mean, rel_tol=1e-9)
            if is_binary or (len(values) >= SOME_ROWS and len(np.unique(values)) <= 2):
                continue  # one of two values may be rare
            far = is_far(values, column.mean, column.sd, schema.rows, FAR)
            if values.min() >= 0.0 and (values > 0.0).sum() >= SOME_ROWS:
                # incomes and counts have long tails; far values are above 0
                logs = np.log(values[values > 0.0])
                far[values > 0.0] &= is_far(logs, logs.mean(), logs.std(), len(logs), FAR_LOGS)
            if count := int(far.sum()):
                many = f"{count} value{'s' if count > 1 else ''} more than {FAR:g} sds"
                what = f"column '{name}' of client '{clients[place]}' has {many} from the mean"
                warn(f"{what} of all other rows: check the unit, and look for typos")


def warn_of_far_origins(declared: Declaration, schema: Schema) -> None:
    """Warn of products of a column so far from 0 that default priors hold their effects close to 0."""
    for product in declared.parts.common.products:
        names = [factor.head for factor in product.factors if isinstance(factor, Name)]
        for name in names if len(product.factors) > 1 else ():
            column = schema.columns[name]
            if column.kind == "number" and abs(column.mean) > FAR_ORIGIN * column.sd:
                what = f"'{product.name}' has its default prior where '{name}' is 0, far from"
                fix = f"write center({name}) in the product, or give priors"
                warn(f"{what} all rows, and its effect is held close to 0: {fix}")


def is_far(
    values: NDArray[np.float64], mean: float, sd: float, rows: int, times: float
) -> NDArray[np.bool_]:
    """Return which values are more than so many sds of the other rows from these rows' mean, (n,)."""
    distance, ratio = np.abs(values - mean), rows / max(rows - 1, 1)
    others = ratio * (sd**2 - distance**2 / max(rows - 1, 1))
    is_among = others > 1e-9 * sd**2  # else the others have no spread, or it is a new row
    spread = np.sqrt(np.where(is_among, others, sd**2))
    far: NDArray[np.bool_] = distance * np.where(is_among, ratio, 1.0) > times * spread
    return far
