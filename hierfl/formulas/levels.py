"""The levels of a category, as clients' answers give them: their order, rare and unused ones, and what is none."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Literal

from hierfl.data.frames import is_number
from hierfl.formulas.answers import OfColumn
from hierfl.formulas.columns import Column, ordered, refuse_similar
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.questions import Ask, Question
from hierfl.formulas.transforms import moments

Rare = Literal["refuse", "merge"]
OTHER = "other"  # the level that rare ones are merged into
MANY_LEVELS = 50  # of a category, beyond which numbers with decimals were meant as numbers


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
    how, fault = f"schema(..., levels={{'{name}': [...]}})", ""
    if len(orders) > 1:
        pair = f"{', '.join(orders[0])} at one client and {', '.join(orders[1])} at another"
        fault = f"column '{name}' has the levels {pair}: give all the same, or {how}"
    elif whole and not orders and not all(is_number(n) or n in ("False", "True") for n in seen):
        what = f"the levels {', '.join(ordered(seen)[:4])} of the ordinal column '{name}' have no order"
        fault = f"{what}: make it numbers, an ordered category, or {how} from the lowest on"
    if fault:
        raise ValueError(fault)
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
        warnings.warn(
            f"column '{name}' lists its levels as {', '.join(first)} at one client and as "
            f"{', '.join(other)} at another: the first in alphabetical order is the reference, "
            f"unless schema(..., levels={{'{name}': [...]}}) names another",
            stacklevel=4,
        )
        order = ()
    return tuple(level for level in dict.fromkeys((*order, *ordered(seen))) if level in seen)


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
    units = {unit: "the declaration"} if unit else {}
    for client, answer in answers.items():
        if answer.unit:
            units.setdefault(answer.unit, client)
    if len(kinds) > 1:
        words = {"number": "numbers", "category": "names"}
        here, other = sorted(kinds.items(), key=lambda item: item[1] != first)
        what = f"{words[here[0]]} at client '{first}' and {words[other[0]]} at client '{other[1]}'"
        fault = f"holds {what}: make it the same everywhere, or write C({name})"
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
def refuse_decimals(name: str, levels: Sequence[str]) -> None:
    """Refuse a category whose many levels are numbers with decimals."""
    decimals = [level for level in levels if is_number(level) and not float(level).is_integer()]
    if len(decimals) > MANY_LEVELS:
        what = f"{len(levels)} different values, such as {decimals[0]}, and is read as categories"
        raise ValueError(f"column '{name}' has {what}: make it numbers, or cut it, pandas.cut")


def name_unused(name: str, column: Column, answers: Collection[OfColumn], least: int) -> None:
    """Warn of levels that a category declares and no rows have."""
    seen = {level for answer in answers for level in (answer.counts or {})}
    declared = dict.fromkeys(level for answer in answers for level in answer.declared)
    if unused := [repr(level) for level in declared if level not in seen]:
        becomes = f"is left out: keep it by schema(..., levels={{'{name}': [...]}})"
        if {*declared} <= {*column.levels}:
            becomes = "keeps its prior: remove it, unless rows to come have it"
        having = "no rows have" if least == 1 else f"no client has {least} rows with"
        warnings.warn(
            f"column '{name}' declares a level that {having}, {', '.join(unused)}, which {becomes}",
            stacklevel=3,
        )


def two_levels(declared: Declaration, column: Column) -> Column:
    """Return a response of yes and no with its two levels; refuse others."""
    is_pair, kind, fault = len(column.levels) == 2, declared.family.kind, ""
    if kind == "category" and is_pair:
        pair = " and ".join(column.levels)
        fault = f"the response has two levels, {pair}: take family='bernoulli'"
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
        return replace(
            column, levels=(*(n for n in column.levels if n != OTHER), OTHER), rare=OTHER
        )
    how = f"schema(..., levels={{'{name}': [...]}})"
    why = f"values that no client has {least} rows of: agree on them beforehand, {how}, or merge "
    why += "them, rare='merge'"
    if rare == "merge":
        why = (
            "rare levels, and they are ordered: they cannot be merged into one beyond all others; "
        )
        why += f"agree on them beforehand, {how}"
    elif not column.levels:
        why = (
            f"no value that {least} rows share, as an ID or a date has none, and the formula reads "
        )
        why += "it as categories: take it out"
    elif least == 1:
        why = (
            f"values that are none of the levels {', '.join(column.levels)}: correct them, or name "
        )
        why += "them all in levels={...}"
    raise ValueError(f"column '{name}' of client '{lacking[0]}' has {why}")
