"""Table 1: what clients' rows are, by counts, means, sds and bounds of quantiles, also over nodes."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from hierfl.core.arguments import expect_count, expect_kind, spelled
from hierfl.core.tables import Shown, cell, printed
from hierfl.data.consistency import is_column
from hierfl.effects.pooled_rows import (
    DIFFERENT,
    Form,
    as_levels,
    counted,
    form_of,
    order_of_groups,
    pooled_levels,
    pooled_numbers,
)
from hierfl.formulas.columns import by_client, incomplete
from hierfl.formulas.formula import Formula
from hierfl.formulas.table_answers import (
    FEW,
    NumbersAnswer,
    TableAnswer,
    VariableAnswer,
    table_answer,
)

LEAST_COUNT = 5  # over nodes
ALL = "all"
CLIENT = "client"  # names the clients of {client: frame}


@printed
@dataclass(frozen=True, eq=False)
class Description:
    """Table 1: clients' rows, by group.

    Args:
        title: whose rows.
        by: the column of the groups; None: there are none.
        frame: one row per variable, level of a category and group ("all" for all rows): `variable`,
            `level`, `group`, `n` (rows with a value), `missing`; of a level `count` and `share`, of IDs
            and dates the `count` of different values, at the level "(different values)"; of
            numbers `mean`, `sd` (n - 1), `q25`, `median` and `q75`. Each quantile lies between its
            columns `_low` and `_high`, infinite where nothing bounds it; in one process they are equal.
            Fewer rows than `least_count`, but some, are -1 of `missing`.
        table: the same in words, a column per group.
        least_count: rows on which each number rests, at least.
        left_out: client -> why it is not in the table.
        note: how the numbers are to be read.
    """

    title: str
    by: str | None
    frame: pd.DataFrame
    table: pd.DataFrame
    least_count: int
    left_out: Mapping[str, str]
    note: str

    def __tables__(self) -> Shown:
        return Shown(self.title, self.table, self.note)


@spelled
def describe(
    rows: Any,
    formula: Any = None,
    *,
    by: str | None = None,
    columns: Sequence[str] | None = None,
    least_count: int | None = None,
) -> Description:
    """Describe the rows of clients as the Table 1 of a paper does.

    Each client returns counts, means, sds and cumulative counts of its own rows. With `least_count`
    above 1, as always over nodes, no number rests on fewer rows: counts are rounded to multiples of
    it, levels and groups with fewer rows are not named, means and sds have two digits after the
    first digit of the sd, and quantiles are bounded by ranges of at least that many rows. A node
    answers if its policy has "descriptions" in `may_leave`, about columns that its formula reads,
    and once for the same rows (docs/privacy.md).

    Args:
        rows: one frame, or {client: frame}; or nodes, as for `hierfl.nodes.fit`.
        formula: the formula whose columns are described; needed over nodes. Default None: all
            columns.
        by: a column whose values are the groups; or the column of clients ("client" for {client:
            frame} without a formula). Default None: no groups.
        columns: columns of the table. Default None: those of the formula, or all.
        least_count: an integer. Default None: 1 for frames, 5 over nodes.

    Raises:
        TypeError: `rows` is neither frames nor nodes, there is no formula over nodes, a column's
            name is not a string, or `least_count` is not an integer.
        KeyError: a client lacks a column.
        ValueError: `least_count` is below 1, no client can be described, or a value is called
            "(missing)" or "(others)", the names for rows without a value and for values too rare to
            be named.
        Forbidden, TooFewNodes: no node's policy allows it, or too few nodes answer.
    """
    over, least = least_of(rows, least_count)
    left_out: Mapping[str, str] = {}
    frames: Collection[pd.DataFrame] = ()
    if over:
        expect_kind(formula, Formula, "formula", "give the one whose columns nodes describe")
        described = _wanted(columns, formula.declared.columns_read, by)
        grouping = None if by == formula.clients else by
        answers, left_out = rows.ask_about_rows(formula, "table", described, grouping, least)
        is_client = by == formula.clients
    else:
        frames, answers, described, is_client = _here(rows, formula, by, columns, least)
    if is_client:
        answers = {client: _renamed(table, client) for client, table in answers.items()}
    return _made(answers, described, by, least, left_out, frames)


def least_of(rows: Any, count: int | None) -> tuple[bool, int]:
    """Return whether rows are at nodes, and the rows that each number must rest on."""
    over = callable(getattr(rows, "ask_about_rows", None))
    if count is None:
        return over, LEAST_COUNT if over else 1
    return over, expect_count(count, "least_count")


def _here(
    rows: Any, formula: Formula | None, by: str | None, columns: Sequence[str] | None, least: int
) -> tuple[Collection[pd.DataFrame], dict[str, TableAnswer], list[str], bool]:
    """Return frames, their clients' answers, their columns, and whether groups are the clients."""
    if formula is None and isinstance(rows, pd.DataFrame):
        if not len(rows):
            raise ValueError("the frame has no rows: give at least one")
        frames: Mapping[str, Any] = {"": rows}
    else:
        expect_kind(rows, pd.DataFrame | Mapping, "rows", "give a frame, {client: frame}, or nodes")
        frames = by_client(rows, "" if formula is None else formula.clients)
    first = next(iter(frames.values()))
    described = _wanted(columns, formula.declared.columns_read if formula else first.columns, by)
    is_client = by is not None and by == (formula.clients if formula else CLIENT)
    if formula is None:  # a column comes first
        is_client &= "" not in frames and not any(is_column(of, by) for of in frames.values())
    grouping = None if is_client else by
    answers = {}
    for client, frame in frames.items():
        whole = None
        if formula is not None and least > 1:
            whole = ~incomplete(frame, formula.declared.rows_of, client, "drop")
        answers[client] = table_answer(frame, described, grouping, client, least, whole)
    return frames.values(), answers, described, is_client


def _wanted(columns: Sequence[str] | None, read: Iterable[Any], by: str | None) -> list[str]:
    """Return the different columns of the table."""
    if isinstance(columns, str):
        raise TypeError(f"columns is '{columns}': give a list of columns, ['{columns}']")
    names = [name for name in dict.fromkeys(read if columns is None else columns) if name != by]
    for name in names:
        expect_kind(name, str, "the name of a column", "rename it, frame.rename(columns=str)")
    return names


def _renamed(table: TableAnswer, client: str) -> TableAnswer:
    """Return a client's answer with all its rows as the group of its name."""
    if not table.rows:  # all of them are too few
        return table
    return TableAnswer({client: table.rows[""]}, {client: table.groups[""]}, table.left)


# ------------------------------------------------------------ the table
Parts = list[VariableAnswer]


def _made(
    answers: Mapping[str, TableAnswer],
    columns: Sequence[str],
    by: str | None,
    least: int,
    left_out: Mapping[str, str],
    frames: Collection[pd.DataFrame],
) -> Description:
    """Return the table of clients' answers, of each group and of all."""
    seen = dict.fromkeys(name for table in answers.values() for name in table.rows)
    groups = tuple(seen)
    if by is not None and seen.keys().isdisjoint(answers):
        groups = order_of_groups(seen, frames, by)
    if not groups:
        raise ValueError(f"no client has a group of {least} rows or more: nothing may leave")
    alone = [(name, (name,)) for name in groups if by is not None]
    lines, words = [], {}
    forms, every = {}, [of for table in answers.values() for of in table.groups.values()]
    for column in columns:
        known = [answer for of in every if (answer := of[column].found) is not None]
        forms[column] = form_of(column, known, least)
    for name, some in [*alone, (f"({ALL})" if ALL in groups else ALL, groups)]:
        tables = [
            (answer, group) for answer in answers.values() for group in some if group in answer.rows
        ]
        rows = sum(answer.rows[group] for answer, group in tables)
        own = {"rows": f"{rows:,}"}
        for column in columns:
            variables = [answer.groups[group][column] for answer, group in tables]
            rows_of_frame = _lines(column, forms[column], variables, least)
            lines += [{"variable": column, **line, "group": name} for line in rows_of_frame]
            own |= _in_words(column, rows_of_frame, least)
        words[name] = own
    frame = pd.DataFrame(lines, columns=[*FRAME])
    labels = _labels(columns, words)
    table = pd.DataFrame({n: [own.get(k, "") for k in labels] for n, own in words.items()}, labels)
    title = f"Rows of {len(answers)} client{'s' * (len(answers) > 1)}"
    title = "All rows" if "" in answers else title
    return Description(
        title + (f", by {by}" if by else ""),
        by,
        frame,
        table,
        least,
        left_out,
        _note(answers, [c for c, form in forms.items() if form.kind == "counted"], least, left_out),
    )


FRAME = (
    "variable level group n missing count share mean sd q25 q25_low q25_high median median_low "
    "median_high q75 q75_low q75_high"
).split()


def _lines(column: str, form: Form, variables: Parts, least: int) -> list[dict[str, Any]]:
    """Return the rows of a column's frame, of one group."""
    lost = [variable.missing for variable in variables]
    missing = FEW if any(lost) and max(lost) == FEW else sum(max(n, 0) for n in lost)
    answers = [variable.found for variable in variables if variable.found is not None]
    n, partly = sum(variable.rows for variable in answers), len(answers) < len(variables)
    about = {"level": "", "n": n, "missing": missing, "partly": partly}
    if form.kind == "counted":
        return [counted(answers, about)]
    if form.kind == "levels":
        return pooled_levels(form.levels, [as_levels(variable) for variable in answers], about)
    numbers = [variable for variable in answers if isinstance(variable, NumbersAnswer)]
    return [about | pooled_numbers(numbers, least)]


# ------------------------------------------------------------ in words
def _in_words(column: str, lines: Sequence[Mapping[str, Any]], least: int) -> dict[str, str]:
    """Return the cells of a column of the table, by their labels."""
    cells = {}
    for line in lines:
        if line["level"] == DIFFERENT:
            cells[f"{column}, different values"] = f"{line['count']:,}"
        elif line["level"]:
            label = f"{column}: {line['level']}, n (%)"
            cells[label] = _count(line["count"], least)
            if not math.isnan(line["share"]):
                cells[label] += f" ({100.0 * line['share']:.0f}%)"
        elif "mean" in line:
            cells[f"{column}, mean (sd)"] = f"{cell(line['mean'])} ({cell(line['sd'])})"
            low, at, high = (cell(line[name]) or "-" for name in ("q25", "median", "q75"))
            cells[f"{column}, median [quartiles]"] = f"{at} [{low}, {high}]"
        else:
            cells[f"{column}, mean (sd)"] = ""
    if not lines[0]["n"]:
        cells = dict.fromkeys(cells, "")
    elif lines[0]["partly"]:
        cells = {label: f"{text} of {lines[0]['n']:,}" for label, text in cells.items() if text}
    return cells | {f"{column}, missing": _count(lines[0]["missing"], least)}


def _count(count: int, least: int) -> str:
    return f"{count:,}" if count >= 0 else f"below {least}"


def _labels(columns: Sequence[str], words: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the labels of the table in the order of its columns; missing values come last, where there are some."""
    labels = ["rows"]
    for column in columns:
        starts = (f"{column}: ", f"{column}, ")
        own = [label for of in words.values() for label in of if label.startswith(starts)]
        last = f"{column}, missing"
        labels += [label for label in dict.fromkeys(own) if label not in (*labels, last)]
        labels += [last] if any(of[last] != "0" for of in words.values()) else []
    return labels


def _note(
    answers: Mapping[str, TableAnswer], ids: Sequence[str], least: int, left_out: Mapping[str, str]
) -> str:
    """Return how the numbers are to be read, and what is not in them."""
    lines = []
    if least > 1:
        lines.append(
            f"Counts are to the nearest {least}; medians and quartiles are interpolated, and .frame has "
            "their bounds. Levels and groups with fewer rows are not named. 'Of N' marks cells that leave "
            "out clients in which too few rows differ."
        )
    if ids:
        lines.append(f"Counted and not listed, as IDs and dates are: {', '.join(ids)}.")
    return "\n".join([*lines, *what_is_left_out(answers, left_out)])


def what_is_left_out(answers: Mapping[str, Any], left_out: Mapping[str, str]) -> Iterator[str]:
    """Yield at which clients groups are too small, and who is left out, why."""
    if some := [client for client, answer in answers.items() if answer.left]:
        yield f"Groups with too few rows or events are left out at {', '.join(some)}."
    yield from (f"Client '{client}' is not included: {why}" for client, why in left_out.items())
