"""How clients agree on a schema: the server adds up what they answer, stage by stage."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hierfl.core.arguments import expect, expect_count, spelled
from hierfl.core.user_warnings import warn
from hierfl.formulas.answers import OfDesign
from hierfl.formulas.columns import (
    CENSORED,
    by_client,
    complete_rows,
    level_name,
    moments,
    ordered,
    refuse_similar,
)
from hierfl.formulas.declaration import SOME, Declaration, grouping_name
from hierfl.formulas.design import Design, designs_of, every_design_of
from hierfl.formulas.expressions import column_of
from hierfl.formulas.imputed import check_known, with_known
from hierfl.formulas.levels import (
    Rare,
    agreed_column,
    refuse_identifier,
    two_levels,
    with_rare,
)
from hierfl.formulas.questions import Ask, Kinds, Question, answers_of
from hierfl.formulas.schema import OFFSET, STATEFUL, Grouping, Level, Margin, Schema
from hierfl.formulas.signatures import arguments
from hierfl.formulas.structures import structures
from hierfl.formulas.transforms import SMOOTHS, Constants, polynomials_of, smooth_of, spline_of

FAR = 1e-6  # sd of numbers over their mean, below which single precision loses their differences


@spelled
def schema(
    frames: Any,
    formula: Any = None,
    *,
    clients: str | None = None,
    units: Mapping[str, str] | None = None,
    levels: Mapping[str, Sequence[Any]] | None = None,
    min_count: int | None = None,
    rare: Rare = "refuse",
    start: Schema | None = None,
) -> Schema:
    """Return what clients agree on before the first round, from their counts and sums alone.

    Args:
        frames: one frame with the column of clients, or {client: frame}. `frame.attrs["units"]` may
            hold units, column -> unit.
        formula: the `Formula` that the schema is for. Default None: all columns, and no terms.
        clients: the column that names the clients, if there is no formula.
        units: column -> unit, such as {"age": "years"}.
        levels: column -> levels of a category, or groups, fixed beforehand; clients send nothing
            about them.
        min_count: a client does not name levels and groups with fewer rows. Default 1: all are
            named, as for rows in one process; over nodes, and with rare="merge", it is 5.
        rare: what happens to a level that no client names: "refuse" it, or "merge" it into "other".
        start: a schema of columns to start from.

    Raises:
        KeyError: a client lacks a column.
        TypeError, ValueError: clients disagree on a column, or a value does not fit the formula;
            the message names the client, the column and the value.
    """
    if formula is None and clients is None:
        what = "schema needs clients='hospital', the column that names the clients"
        raise TypeError(f"{what}, or a formula")
    expect(rare=(rare, ("refuse", "merge")))
    least = 1 if rare == "refuse" else 5
    if min_count is not None:
        least = expect_count(min_count, "min_count")
    by = formula.clients if formula is not None else str(clients)
    by_name, declared = by_client(frames, by), None if formula is None else formula.declared
    kinds: Kinds = {str(n): None for n in next(iter(by_name.values())).columns if n != by}
    needs, missing = (kinds, "drop") if declared is None else (declared.rows_of, declared.missing)
    rows = complete_rows(by_name, needs, missing)
    if declared is not None and declared.imputed:
        rows = {name: with_known(frame, declared, name, least) for name, frame in rows.items()}
    read = kinds if declared is None else declared.columns

    return agreed(
        lambda question: answers_of(question, by, read, declared, rows),
        by,
        read,
        declared,
        units=units or {},
        levels=levels or {},
        min_count=least,
        rare=rare,
        start=start,
    )


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
    """Return what clients agree on by the answers of `ask`; without `declared`, of columns alone, from `start` on."""
    levels_of = _known_levels(levels, units, kinds, declared, clients)
    is_ordinal = declared is not None and declared.family.kind == "ordered"
    ordinal = {declared.parts.response} if declared is not None and is_ordinal else set[str]()
    if declared is not None:
        ordinal |= {column_of(call) for call in declared.calls if call.callee == "mo"}
    if start is None or not has_columns(start, kinds):
        answers = ask(Question("columns", min_count, known=tuple(levels_of)))
        censored = "" if declared is None else declared.parts.additions.get("cens", "")
        levels_of.setdefault(censored, tuple(CENSORED))
        columns = {}
        for name in kinds:
            of_one = {client: columns_here[name] for client, columns_here in answers.items()}
            column = agreed_column(name, of_one, levels_of.get(name), units.get(name, ""), ordinal)
            if column.kind == "category" and name != censored:
                if declared is not None:
                    refuse_identifier(name, of_one.values())
                    if name == declared.parts.response:
                        column = two_levels(declared, column)
                column = with_rare(name, column, ask, rare, min_count, name in ordinal)
            columns[name] = column
        start = Schema(clients, sum(ask(Question("rows")).values()), min_count, columns)
    return start if declared is None else agree_on_formula(start, declared, ask, levels_of)


def _known_levels(
    levels: Mapping[str, Sequence[Any]],
    units: Mapping[str, str],
    kinds: Kinds,
    declared: Declaration | None,
    clients: str,
) -> dict[str, tuple[str, ...]]:
    """Return the names of levels that are agreed beforehand; refuse what nothing would use."""
    groupings = () if declared is None else declared.groupings
    usable = {*kinds, *(grouping_name(by) for by in groupings if clients not in by)}
    for argument, names_of in (("levels", levels), ("units", units)):
        if unused := sorted({*names_of} - usable):
            what = f"{argument} has '{unused[0]}', not one of {', '.join(sorted(usable))}"
            raise ValueError(f"{what}: correct its name, or leave it out")
    names = {name: tuple(map(level_name, of)) for name, of in levels.items()}
    for name, of in names.items():
        refuse_similar({*of}, f"levels of '{name}'")
        if isinstance(levels[name], str) or len({*of}) < len(of) or kinds.get(name) == "number":
            fix = "give a list of different names, of a column or groups not read as a number"
            raise ValueError(f"levels of '{name}' are {levels[name]!r}: {fix}")
    return names


def has_columns(start: Schema, kinds: Kinds) -> bool:
    """Return whether a schema has all columns, as categories where the formula needs them."""
    columns = start.columns
    return all(n in columns and kind in (None, columns[n].kind) for n, kind in kinds.items())


# ------------------------------------------------------------ a formula's parts
def agree_on_formula(
    schema: Schema, declared: Declaration, ask: Ask, levels: Mapping[str, tuple[str, ...]]
) -> Schema:
    """Return a schema of columns with what a formula needs too: groups, constants, design."""
    place = partial(_grouping, declared, schema, ask)
    groups = {grouping_name(by): place(by, levels) for by in declared.groupings}
    if declared.structured:
        groups |= structures(
            declared,
            schema,
            ask,
            lambda by, group_levels: place(by, {grouping_name(by): group_levels}),
        )
    schema = replace(schema, formula=declared.text, groups=groups)
    # Inner calls come first, so that each has the constants of those inside it.
    for text in declared.transforms:
        if text not in schema.transforms:
            constants = _constants(declared, schema, ask, text)
            schema = replace(schema, transforms={**schema.transforms, text: constants})
    answers = [*ask(Question("design", schema=schema)).values()]
    margins = _margins(declared, schema, answers)
    _warn_of_own_columns(declared, schema, answers)
    if len(answers) == schema.rows:
        _warn_of_single_rows(declared, (schema.clients,))
    responses = [answer.response for answer in answers if answer.response is not None]
    response = Margin(*moments(responses)) if responses else None
    every = margins if response is None else {**margins, declared.parts.response: response}
    for name, of in every.items():
        if 0.0 < of.sd < FAR * abs(of.mean):
            what = f"'{name}' has the mean {of.mean:.9g} and the sd {of.sd:.3g}, too far apart"
            raise ValueError(f"{what} for single precision: subtract a round number first")
    return replace(schema, design=margins, response=response)


def _margins(
    declared: Declaration, schema: Schema, answers: Sequence[OfDesign]
) -> dict[str, Margin]:
    """Return mean and sd of each column of the design; refuse columns without an effect."""
    designs, margins = every_design_of(declared, schema), dict[str, Margin]()
    terms = [term for design in designs for term in design.terms]
    imputed = {name: term for term in terms if term.calls("mi") for name in term.columns}
    for name in answers[0].columns:
        own = [answer.columns[name] for answer in answers]
        if not any(sums.count for sums in own) and name not in imputed:
            margins[name] = Margin(0.0, 1.0)  # no client may tell; curves are of about that size
            continue
        mean, sd = moments(own)
        if name in imputed:
            above = len(answers) > 1 and all(name in answer.constant for answer in answers)
            check_known(imputed[name], mean, sd, above=above)
        is_flat = sd == 0.0 and name != OFFSET and not _keeps_prior(name, mean, designs, answers)
        has_one = any(d.has_intercept and name in d.columns for d in designs)
        if is_flat and (mean == 0.0 or has_one):
            fix = "take it out of the formula, or subtract a round number from the column first"
            what = f"one value, {mean:.6g}, or nearly so, in all rows, and no effect"
            raise ValueError(f"the term '{name}' has {what}: {fix}")
        margins[name] = Margin(mean, sd)
    return margins


def _warn_of_own_columns(
    declared: Declaration, schema: Schema, answers: Sequence[OfDesign]
) -> None:
    """Warn of slopes by client, or by groups within, of columns that have one value at each client."""
    for own in (declared, *declared.of_parameters.values()):
        for group, design in zip(own.parts.groups, designs_of(own, schema)[1:], strict=True):
            at = schema.groups.get(group.name)
            names = [
                n
                for n in design.columns
                if all(n in of.constant and of.columns[n].count > 0 for of in answers)
            ]
            if names and design.has_intercept and (at is None or at.level == "within"):
                what = (
                    f"'{names[0]}' has one value in all rows of each client, and in '{group.text}'"
                )
                fix = "leave it out of the bar, and add it to the common terms"
                warn(f"{what} its slope cannot be told from the intercept: {fix}")


def _keeps_prior(
    name: str, mean: float, designs: Sequence[Design], answers: Sequence[OfDesign]
) -> bool:
    """Return whether a column has one value since a level has no rows, so that its coefficient keeps its prior."""
    if mean == 0.0 and any(name in design.coded for design in designs):
        return True
    terms = [term for design in designs for term in design.terms if term.monotone]
    steps = next((term.columns for term in terms if name in term.columns), ())
    return any(moments([answer.columns[step] for answer in answers])[1] > 0.0 for step in steps)


def _warn_of_single_rows(declared: Declaration, by: tuple[str, ...]) -> None:
    """Warn of groups of one row each beside a noise scale; without one they are over-dispersion."""
    if "weights" in declared.parts.additions:
        return  # each is as many rows
    groups = (of for of in declared.parts.groups if of.by == by and not of.kind)
    group = next((of for of in groups if of.terms.has_intercept), None)
    if group and "sigma" in declared.family.parameters(SOME):
        what = f"'{group.text}' has one row in each group: its sd and sigma cannot be told apart"
        warn(f"{what} but by their priors. Leave it out, or group by a column that rows share")


def _grouping(
    declared: Declaration,
    schema: Schema,
    ask: Ask,
    by: tuple[str, ...],
    levels: Mapping[str, tuple[str, ...]],
) -> Grouping:
    """Return how groups lie to the clients; refuse groups whose place cannot be known."""
    least, name = schema.min_count, grouping_name(by)
    answers = ask(Question("groups", least, by=by))
    largest = max(answer.distinct for answer in answers.values())
    seen = [group for a in answers.values() for group in a.counts]
    shared = 0 if schema.clients in by else len(seen) - len(set(seen))
    if sum(answer.distinct for answer in answers.values()) - shared == schema.rows:
        _warn_of_single_rows(declared, by)
    if schema.clients in by:
        return Grouping("within", most=largest)
    agreed_levels = levels.get(name, ())
    hidden = [client for client, a in answers.items() if a.distinct > len(a.counts)]
    refuse_similar(set(seen), f"the groups of '{name}'")
    level: Level = "above" if largest == 1 else "crossed"
    if not agreed_levels and largest > 1 and not hidden and len(set(seen)) == len(seen):
        return Grouping("within", most=largest)
    groups, how = agreed_levels or ordered(seen), f"schema(..., levels={{'{name}': [...]}})"
    if hidden and (agreed_levels or largest == 1):
        outside = ask(Question("outside", by=by, levels=groups))
        hidden = [client for client in hidden if outside[client]]
        what = f"a group of '{name}' that is not among {', '.join(groups)}: add it to {how}"
    else:
        what = f"groups of '{name}' with fewer than {least} rows, which it does not name: write "
        what += f"({schema.clients}:{name}) if no others have them, or {how} if others do"
    if hidden:
        raise ValueError(f"client '{hidden[0]}' has {what}")
    return Grouping(level, groups)


def _constants(declared: Declaration, schema: Schema, ask: Ask, text: str) -> Constants:
    """Return the constants of one transform: mean and sd first, then from counts or powers."""
    call = declared.transforms[text]
    about = Question("call", schema.min_count, text=text, schema=schema)
    mean, sd = moments([answer.sums for answer in ask(about).values()])
    if sd == 0.0:
        fix = "take it out of the formula, or subtract a round number first"
        raise ValueError(f"the argument of '{text}' has one value, {mean:.6g}, or nearly so: {fix}")
    needs, options = STATEFUL[call.callee].needs, arguments(call)
    if not needs:
        return Constants(mean, sd)
    more = [answer.more for answer in ask(replace(about, at=(mean, sd))).values()]
    if needs == "powers":
        return polynomials_of(text, mean, sd, more, options["degree"])
    counts = np.sum(more, axis=0)
    if call.callee in SMOOTHS:
        return smooth_of(call, (mean, sd), counts, options)
    return spline_of(text, mean, sd, counts, options)
