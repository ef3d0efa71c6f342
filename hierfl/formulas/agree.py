"""How clients agree on a schema: the server adds up what they answer, stage by stage."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from hierfl.data.frames import is_number
from hierfl.formulas.answers import OfColumn
from hierfl.formulas.columns import (
    CENSORED,
    MANY_LEVELS,
    Column,
    level_name,
    ordered,
    refuse_decimals,
    refuse_similar,
)
from hierfl.formulas.constants import STATEFUL
from hierfl.formulas.design import every_design_of
from hierfl.formulas.parse import Declaration
from hierfl.formulas.plausible import stateful_calls
from hierfl.formulas.questions import Ask, Kinds, Question, call_of
from hierfl.formulas.schema import OFFSET, Grouping, Level, Margin, Schema
from hierfl.formulas.syntax import grouping_name
from hierfl.formulas.terms import monotone_columns, options_of
from hierfl.formulas.transforms import (
    SMOOTHS,
    Constants,
    Sums,
    moments,
    polynomials_of,
    smooth_of,
    spline_of,
)

Rare = Literal["refuse", "merge"]
OTHER = "other"  # the level that rare ones are merged into
FAR = 1e-6  # sd of numbers over their mean, below which single precision loses their differences


def agreed(
    ask: Ask,
    clients: str,
    kinds: Kinds,
    declared: Declaration | None,
    *,
    units: Mapping[str, str],
    levels: Mapping[str, Sequence[Any]],
    min_count: int,
    rare: Rare,
    start: Schema | None,
) -> Schema:
    """Return what clients agree on, by the answers that `ask` returns.

    Without `declared` the schema is of columns alone, and `start` is one to begin with.
    """
    known = _known_levels(levels, units, kinds, declared) if levels or units else {}
    is_ordinal = declared is not None and declared.family.kind == "ordered"
    ordinal = {declared.parts.response} if declared is not None and is_ordinal else set[str]()
    if declared is not None and "mo(" in declared.text:
        ordinal |= set[str]().union(*map(monotone_columns, declared.described))
    if start is None or not has_columns(start, kinds):
        answers = ask(Question("columns", min_count, known=tuple(known)))
        censored = "" if declared is None else declared.parts.additions.get("cens", "")
        known.setdefault(censored, tuple(CENSORED))
        columns = {}
        for name in kinds:
            of_one = {client: found[name] for client, found in answers.items()}
            column = agreed_column(name, of_one, known.get(name), units.get(name, ""), ordinal)
            if column.kind == "category" and name != censored:
                if len(column.levels) > MANY_LEVELS:
                    refuse_decimals(name, column.levels)
                if declared is not None and name == declared.parts.response:
                    column = _two_levels(declared, column)
                column = _with_rare(name, column, ask, rare, min_count, name in ordinal)
                named = dict.fromkeys(n for answer in of_one.values() for n in answer.declared)
                lost = [level for level in named if level not in column.levels]
                if lost and name not in known and not column.rare:
                    warnings.warn(
                        f"column '{name}' has no rows of its levels {', '.join(lost)}, which are left "
                        f"out: keep them by schema(..., levels={{'{name}': [...]}})",
                        stacklevel=2,
                    )
            columns[name] = column
        start = Schema(clients, sum(ask(Question("rows")).values()), min_count, columns)
    return start if declared is None else agree_on_formula(start, declared, ask, known)


def _known_levels(
    levels: Mapping[str, Sequence[Any]],
    units: Mapping[str, str],
    kinds: Kinds,
    declared: Declaration | None,
) -> dict[str, tuple[str, ...]]:
    """Return the names of levels that are agreed beforehand; refuse what nothing would use."""
    groups = (
        [] if declared is None else [b for b in declared.groupings if declared.clients not in b]
    )
    usable = {*kinds, *map(grouping_name, groups)}
    for argument, given in (("levels", levels), ("units", units)):
        if unused := sorted({*given} - usable):
            raise ValueError(
                f"{argument} has '{unused[0]}', which is none of {', '.join(sorted(usable))}: "
                "correct its name, or leave it out"
            )
    known = {name: tuple(map(level_name, of)) for name, of in levels.items()}
    for name, of in known.items():
        refuse_similar({*of}, f"levels of '{name}'")
        if isinstance(levels[name], str) or len({*of}) < len(of) or kinds.get(name) == "number":
            raise ValueError(
                f"levels of '{name}' are {levels[name]!r}: give a list of different names, of a "
                "column or groups that the formula does not read as a number"
            )
    return known


def has_columns(start: Schema, kinds: Kinds) -> bool:
    """Return whether a schema has all columns, as categories where the formula needs them."""
    for name, kind in kinds.items():
        if name not in start.columns or kind not in (None, start.columns[name].kind):
            return False
    return True


def _two_levels(declared: Declaration, column: Column) -> Column:
    """Return a response of yes and no with its two levels; refuse others."""
    if declared.family.kind == "category" and len(column.levels) == 2:
        raise ValueError(
            f"the response '{declared.parts.response}' has two levels, {column.levels[0]} and "
            f"{column.levels[1]}: take family='bernoulli'"
        )
    if declared.family.kind != "binary" or len(column.levels) == 2:
        return column
    if set(column.levels) <= {"False", "True"}:
        return replace(column, levels=("False", "True"))
    raise ValueError(
        f"the response '{declared.parts.response}' has the levels {', '.join(column.levels[:4])}, "
        f"and family '{declared.family.name}' needs two: agree on them, "
        f"schema(..., levels={{'{declared.parts.response}': ['no', 'yes']}}), or make it 0 and 1"
    )


def _with_rare(
    name: str, column: Column, ask: Ask, rare: Rare, least: int, is_ordinal: bool
) -> Column:
    """Return a category with a level for rare values, or refuse them."""
    outside = ask(Question("outside", by=(name,), levels=column.levels))
    left = [client for client, rows in outside.items() if rows]
    if not left:
        return column
    if rare == "merge" and is_ordinal:
        raise ValueError(
            f"column '{name}' of client '{left[0]}' has rare levels, and they are ordered: they "
            "cannot be merged into one beyond all others; agree on them beforehand, "
            f"schema(..., levels={{'{name}': [...]}})"
        )
    if rare == "refuse" and least == 1:
        raise ValueError(
            f"column '{name}' of client '{left[0]}' has values that are none of the levels "
            f"{', '.join(column.levels)}: correct them, or name them all in levels={{...}}"
        )
    if rare == "refuse":
        raise ValueError(
            f"column '{name}' of client '{left[0]}' has values that no client has {least} rows "
            f"of: agree on them beforehand, schema(..., levels={{'{name}': [...]}}), or merge "
            "them, rare='merge'"
        )
    return replace(column, levels=(*(n for n in column.levels if n != OTHER), OTHER), rare=OTHER)


def levels_of(answers: list[OfColumn], name: str, *, whole: bool) -> tuple[str, ...]:
    """Return the levels in declared, numerical or alphabetical order; `whole` keeps declared ones without rows."""
    seen: set[str] = {level for answer in answers for level in (answer.counts or {})}
    refuse_similar(seen, f"column '{name}'")
    orders = {answer.declared for answer in answers if answer.declared}
    if len(orders) > 1:
        one, other = sorted(orders)[:2]
        raise ValueError(
            f"column '{name}' has the levels {', '.join(one)} at one client and "
            f"{', '.join(other)} at another: give all the same categories, or schema(..., "
            f"levels={{'{name}': [...]}})"
        )
    if whole and not (orders or all(is_number(n) or n in ("False", "True") for n in seen)):
        raise ValueError(
            f"the levels {', '.join(ordered(seen)[:4])} of the ordinal column '{name}' have no "
            "order: make it numbers or an ordered category, or give schema(..., "
            f"levels={{'{name}': [...]}}) from the lowest on"
        )
    if orders:
        return tuple(level for level in next(iter(orders)) if level in seen or whole)
    return ordered(seen)


def agreed_column(
    name: str,
    answers: Mapping[str, OfColumn],
    levels: tuple[str, ...] | None,
    unit: str,
    ordinal: Collection[str],
) -> Column:
    """Return what clients agree on about one column; levels and unit may be known beforehand."""
    first = next(iter(answers))
    for client, answer in answers.items():
        if answer.kind != answers[first].kind:
            kinds = {"number": "numbers", "category": "names"}
            raise ValueError(
                f"column '{name}' holds {kinds[answers[first].kind]} at client '{first}' and "
                f"{kinds[answer.kind]} at client '{client}': make it the same everywhere, or write "
                f"C({name})"
            )
    units, sums = {unit: "the declaration"} if unit else {}, list[Sums]()
    for client, answer in answers.items():
        if answer.unit:
            units.setdefault(answer.unit, client)
        if answer.sums is not None:
            sums.append(answer.sums)
    if len(units) > 1:
        (one, at), (other, elsewhere) = list(units.items())[:2]
        raise ValueError(
            f"column '{name}' is in {one} at '{at}' and in {other} at '{elsewhere}': convert one "
            "of them"
        )
    unit = next(iter(units), "")
    if answers[first].kind == "category":
        if levels is None:
            levels = levels_of(list(answers.values()), name, whole=name in ordinal)
        return Column("category", unit, levels=levels)
    return Column("number", unit, *moments(sums))


# ------------------------------------------------------------ a formula's parts
def agree_on_formula(
    schema: Schema, declared: Declaration, ask: Ask, levels: Mapping[str, tuple[str, ...]]
) -> Schema:
    """Return a schema of columns with what a formula needs too: groups, constants, design."""
    groups = {grouping_name(by): _grouping(by, schema, ask, levels) for by in declared.groupings}
    if "gr(" in declared.text or "car(" in declared.text:
        from hierfl.formulas.structures import structures

        groups |= structures(
            declared,
            schema,
            ask,
            lambda by, known: _grouping(by, schema, ask, {grouping_name(by): known}),
        )
    schema = replace(schema, formula=declared.text, groups=groups)
    # Inner calls come first, so that each has the constants of those inside it.
    for text in map(str, stateful_calls(declared, {})):
        if text not in schema.transforms:
            constants = _constants(declared, schema, ask, text)
            schema = replace(schema, transforms={**schema.transforms, text: constants})
    answers = [*ask(Question("design", schema=schema)).values()]
    margins = {}
    for name in answers[0].columns:
        own = [answer.columns[name] for answer in answers]
        if not any(part.count for part in own) and "mi(" not in name:
            margins[name] = Margin(
                0.0, 1.0
            )  # no client may tell, and curves are of about that size
            continue
        mean, sd = moments(own)
        above = all(name in answer.constant for answer in answers)
        if "mi(" in name:
            from hierfl.formulas.imputed import check_known

            check_known(name, mean, sd, above=above and len(answers) > 1)
        if sd == 0.0 and name != OFFSET:
            designs = every_design_of(declared, schema)
            if mean == 0.0 and any(name in found.coded for found in designs):
                above = False  # a level without rows keeps its prior
            elif mean == 0.0 or any(d.has_intercept and name in d.columns for d in designs):
                raise ValueError(
                    f"the term '{name}' has one value, {mean:.6g}, in all rows of all clients, "
                    "or values too near to it, so that it has no effect: take it out of the "
                    "formula, or subtract a round number from the column first"
                )
        margins[name] = Margin(mean, sd, above)
    responses = [answer.response for answer in answers if answer.response is not None]
    response = Margin(*moments(responses)) if responses else None
    told = margins if response is None else {**margins, declared.parts.response: response}
    for name, of in told.items():
        if 0.0 < of.sd < FAR * abs(of.mean):
            raise ValueError(
                f"'{name}' has the mean {of.mean:.9g} and the sd {of.sd:.3g}, of which single "
                "precision loses the digits: subtract a round number from the column first"
            )
    return replace(schema, design=margins, response=response)


def _grouping(
    by: tuple[str, ...], schema: Schema, ask: Ask, levels: Mapping[str, tuple[str, ...]]
) -> Grouping:
    """Return how groups lie to the clients; refuse groups whose place cannot be known."""
    least, name = schema.min_count, grouping_name(by)
    answers = ask(Question("groups", least, by=by))
    most = max(answer.distinct for answer in answers.values())
    if schema.clients in by:
        return Grouping("within", most=most)
    known = levels.get(name, ())
    hidden = [client for client, a in answers.items() if a.distinct > len(a.counts)]
    seen = [group for a in answers.values() for group in a.counts]
    refuse_similar(set(seen), f"the groups of '{name}'")
    level: Level = "above" if most == 1 else "crossed"
    if not known and most > 1 and not hidden and len(set(seen)) == len(seen):
        return Grouping("within", most=most)
    groups = known or ordered(seen)
    if hidden and (known or most == 1):
        outside = ask(Question("outside", by=by, levels=groups))
        if lost := [client for client in hidden if outside[client]]:
            raise ValueError(
                f"client '{lost[0]}' has a group of '{name}' that is not among "
                f"{', '.join(groups)}: add it to schema(..., levels={{'{name}': [...]}})"
            )
    if hidden and not known and most > 1:
        raise ValueError(
            f"client '{hidden[0]}' has groups of '{name}' with fewer than {least} rows, which it "
            "does not name, so that nobody can tell whether others share them: write "
            f"({schema.clients}:{name}) for groups within it, or schema(..., "
            f"levels={{'{name}': [...]}}) for shared ones"
        )
    return Grouping(level, groups)


def _constants(declared: Declaration, schema: Schema, ask: Ask, text: str) -> Constants:
    """Return the constants of one transform: mean and sd first, then from counts or powers."""
    call = call_of(declared, schema, text)
    about = Question("call", schema.min_count, text=text, schema=schema)
    mean, sd = moments([answer.sums for answer in ask(about).values()])
    if sd == 0.0:
        raise ValueError(
            f"the argument of '{text}' has one value, {mean:.6g}, everywhere, or values too near "
            "to it: take it out of the formula, or subtract a round number first"
        )
    needs = STATEFUL[str(call.callee)].needs
    if not needs:
        return Constants(mean, sd)
    options = options_of(call)
    degree = options.get("degree", 1)
    if needs == "powers" and (not isinstance(degree, int) or not 1 <= degree <= 6):
        raise ValueError(f"the degree of '{text}' is {degree!r}: it must be an integer from 1 to 6")
    second = [answer.more for answer in ask(replace(about, at=(mean, sd))).values()]
    if call.callee in SMOOTHS:
        counts = [[int(n) for n in more] for more in second]
        return smooth_of(str(call.callee), text, (mean, sd), counts, options)
    if needs == "counts":
        return spline_of(text, mean, sd, [[int(n) for n in more] for more in second], options)
    return polynomials_of(text, mean, sd, second, degree)
