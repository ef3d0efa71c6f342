"""How clients agree on a schema: the server adds up what they answer, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from hierfl.formulas.answers import (
    OfColumn,
    count_outside,
    of_call,
    of_columns,
    of_design,
    of_groups,
)
from hierfl.formulas.columns import Column, Kind, complete, ordered
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.design import design
from hierfl.formulas.schema import Grouping, Level, Margin, Schema
from hierfl.formulas.terms import options_of, stateful_calls, with_constants
from hierfl.formulas.transforms import (
    STATEFUL,
    Constants,
    moments,
    polynomials_of,
    spline_of,
)

Rare = Literal["refuse", "merge"]
Frames = Mapping[str, pd.DataFrame]
OTHER = "other"  # the level that rare ones are merged into


def agree_on_columns(
    frames: Frames,
    kinds: Mapping[str, Kind | None],
    clients: str,
    *,
    units: Mapping[str, str],
    levels: Mapping[str, Sequence[Any]],
    least_count: int,
    rare: Rare,
) -> Schema:
    """Return a schema of columns, from one answer of each client and a second one on rare levels.

    Args:
        frames: client -> its rows, none of which misses a value.
        kinds: column -> "number", "category", or None for what the column holds.
        clients: the column that names the clients.
        units: column -> unit.
        levels: column -> levels that are agreed beforehand.
        least_count: smallest count of a level at one client that leaves it.
        rare: what becomes of other levels.

    Raises:
        TypeError, ValueError: clients disagree on a column; or a level is rare and `rare` is "refuse".
    """
    known = frozenset(levels)
    answers = {
        client: of_columns(frame, kinds, client, least_count, known)
        for client, frame in frames.items()
    }
    columns = {}
    for name in kinds:
        of_one = {client: found[name] for client, found in answers.items()}
        given = tuple(map(str, levels[name])) if name in levels else None
        columns[name] = agreed_column(name, of_one, given, units.get(name, ""))
        if columns[name].kind == "category":
            columns[name] = _with_rare(name, columns[name], frames, rare, least_count)
    return Schema(clients, sum(map(len, frames.values())), least_count, columns)


def _with_rare(name: str, column: Column, frames: Frames, rare: Rare, least: int) -> Column:
    """Return a category with a level for rare values, or refuse them."""
    left = {
        client: n
        for client, f in frames.items()
        if (n := count_outside(f, (name,), client, column.levels))
    }
    if not left:
        return column
    if rare == "refuse":
        raise ValueError(
            f"column '{name}' of client '{next(iter(left))}' has values that no client has {least} rows of: agree on "
            f"them beforehand, schema(..., levels={{'{name}': [...]}}), or merge them, rare='merge'"
        )
    return replace(column, levels=(*column.levels, OTHER), rare=OTHER)


def levels_of(answers: list[OfColumn], name: str) -> tuple[str, ...]:
    """Return the levels that some client names, in the order that the clients declare, or by number or alphabet.

    Raises:
        ValueError: clients declare different orders.
    """
    told: set[str] = {level for answer in answers for level in (answer.counts or {})}
    orders = {answer.declared for answer in answers if answer.declared}
    if len(orders) > 1:
        one, other = sorted(orders)[:2]
        raise ValueError(
            f"column '{name}' has the levels {', '.join(one)} at one client and {', '.join(other)} at another: give "
            f"all the same categories, or schema(..., levels={{'{name}': [...]}})"
        )
    if orders:
        return tuple(level for level in next(iter(orders)) if level in told)
    return ordered(np.array(sorted(told), dtype=np.str_))


def agreed_column(
    name: str, answers: Mapping[str, OfColumn], levels: tuple[str, ...] | None, unit: str
) -> Column:
    """Return what clients agree on of one column.

    Args:
        name: the column's.
        answers: client -> its answer.
        levels: that are known beforehand; None: those that clients name.
        unit: declared by the user; "": what the clients' frames declare.

    Raises:
        ValueError: clients hold different kinds or units.
    """
    first = next(iter(answers))
    for client, answer in answers.items():
        if answer.kind != answers[first].kind:
            kinds = {"number": "numbers", "category": "names"}
            raise ValueError(
                f"column '{name}' holds {kinds[answers[first].kind]} at client '{first}' and {kinds[answer.kind]} at "
                f"client '{client}': make it the same at all, or write C({name})"
            )
    units = {unit: "the declaration"} if unit else {}
    for client, answer in answers.items():
        if answer.unit:
            units.setdefault(answer.unit, client)
    if len(units) > 1:
        (one, at), (other, elsewhere) = list(units.items())[:2]
        raise ValueError(
            f"column '{name}' is in {one} at '{at}' and in {other} at '{elsewhere}': convert one of them"
        )
    unit = next(iter(units), "")
    if answers[first].kind == "category":
        return Column(
            "category",
            unit,
            0.0,
            0.0,
            levels if levels is not None else levels_of(list(answers.values()), name),
        )
    mean, sd = moments([a.sums for a in answers.values() if a.sums is not None])
    return Column("number", unit, mean, sd)


# ------------------------------------------------------------------------------------------ a formula's parts
def agree_on_formula(
    schema: Schema, declared: Declaration, frames: Frames, levels: Mapping[str, Sequence[Any]]
) -> Schema:
    """Return a schema of columns with all that a formula needs besides: groups, constants and the design.

    Args:
        schema: of columns.
        declared: the formula.
        frames: client -> its rows, none of which misses a value.
        levels: grouping -> its groups, where they are agreed beforehand.

    Raises:
        ValueError: groups, transforms or the response are not as the formula needs them.
    """
    groups = {":".join(by): _grouping(by, schema, frames, levels) for by in declared.groupings}
    schema = replace(schema, formula=declared.text, groups=groups)
    # Inner calls come first, so that each has the constants of those inside it.
    for found in declared.described:
        for text in stateful_calls(found):
            if text not in schema.transforms:
                constants = _constants(declared, schema, frames, text)
                schema = replace(schema, transforms={**schema.transforms, text: constants})
    common = design(with_constants(declared.common, schema.transforms), schema.columns)
    answers = [
        of_design(common, declared, schema, frame, client) for client, frame in frames.items()
    ]
    margins = {
        name: Margin(
            *moments([answer.columns[name] for answer in answers]),
            above=all(name in answer.constant for answer in answers),
        )
        for name in answers[0].columns
    }
    for name, margin in margins.items():
        if margin.sd == 0.0:
            raise ValueError(
                f"the term '{name}' has one value, {margin.mean:.6g}, in all rows of all clients, so that it has no "
                f"effect: take it out of the formula"
            )
    responses = [answer.response for answer in answers if answer.response is not None]
    response = Margin(*moments(responses)) if responses else None
    return replace(schema, design=margins, response=response)


def _grouping(
    by: tuple[str, ...], schema: Schema, frames: Frames, levels: Mapping[str, Sequence[Any]]
) -> Grouping:
    """Return how groups lie to the clients.

    Raises:
        ValueError: it cannot be told, since some groups have too few rows to be named.
    """
    least, name = schema.least_count, ":".join(by)
    answers = {
        client: of_groups(frame, by, schema.clients, client, least)
        for client, frame in frames.items()
    }
    most = max(answer.distinct for answer in answers.values())
    if schema.clients in by:
        return Grouping("within", most=most)
    known = tuple(map(str, levels[name])) if name in levels else ()
    hidden = [client for client, a in answers.items() if a.distinct > len(a.counts)]
    told = [group for a in answers.values() for group in a.counts]
    level: Level = "above" if most == 1 else "crossed"
    if not known and most > 1 and not hidden and len(set(told)) == len(told):
        return Grouping("within", most=most)
    groups = known or ordered(np.array(sorted(set(told)), dtype=np.str_))
    for client in hidden if known or most == 1 else ():
        if count_outside(frames[client], by, client, groups):
            raise ValueError(
                f"client '{client}' has a group of '{name}' that is not among {', '.join(groups)}: add it to "
                f"schema(..., levels={{'{name}': [...]}})"
            )
    if hidden and not known and most > 1:
        raise ValueError(
            f"client '{hidden[0]}' has groups of '{name}' with fewer than {least} rows, which it does not name, so "
            f"that nobody can tell whether others share them: write ({schema.clients}:{name}) for groups within it, or "
            f"schema(..., levels={{'{name}': [...]}}) for shared ones"
        )
    return Grouping(level, groups)


def _constants(declared: Declaration, schema: Schema, frames: Frames, text: str) -> Constants:
    """Return the constants of one transform: mean and sd first, then what is counted in units of them."""
    call = next(
        calls[text]
        for found in declared.described
        if text in (calls := stateful_calls(with_constants(found, schema.transforms)))
    )
    first = [of_call(call, schema, frame, client, None) for client, frame in frames.items()]
    mean, sd = moments([answer.sums for answer in first])
    if sd == 0.0:
        raise ValueError(
            f"the argument of '{text}' has one value, {mean:.6g}, everywhere: take it out of the formula"
        )
    needs = STATEFUL[str(call.callee)]
    if not needs:
        return Constants(mean, sd)
    options = options_of(call)
    degree = options.get("degree", 1)
    if needs == "powers" and (not isinstance(degree, int) or not 1 <= degree <= 6):
        raise ValueError(f"the degree of '{text}' is {degree!r}: it must be an integer from 1 to 6")
    second = [
        of_call(call, schema, frame, client, (mean, sd)).more for client, frame in frames.items()
    ]
    if needs == "counts":
        return spline_of(text, mean, sd, [[int(n) for n in more] for more in second], options)
    return polynomials_of(text, mean, sd, second, degree)


# ------------------------------------------------------------------------------------------ before a formula
def complete_rows(
    frames: Frames, kinds: Mapping[str, Kind | None], missing: str
) -> dict[str, pd.DataFrame]:
    """Return each client's rows without those that miss a value; refuse those unless `missing` is "drop"."""
    return {client: complete(frame, kinds, client, missing) for client, frame in frames.items()}
