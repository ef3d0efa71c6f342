"""What one client answers while clients agree on a schema: counts and sums of its rows alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hierfl.core.typed_json import Count
from hierfl.data.faults import RowsFault
from hierfl.formulas.columns import (
    Kind,
    check_column,
    column_fault,
    kind_of,
    level_name,
    named,
    number_column,
    numbers,
    prepared,
)
from hierfl.formulas.constants import STATEFUL
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.design import Design
from hierfl.formulas.disclosure import coarse, told, told_together
from hierfl.formulas.expressions import Call, value_of
from hierfl.formulas.schema import OFFSET, Schema
from hierfl.formulas.table_answers import rounded_count
from hierfl.formulas.terms import options_of
from hierfl.formulas.transforms import Sums, counted, powers, sums


@dataclass(frozen=True)
class OfColumn:
    """What a client answers about a column: sums of a number, or counts of levels, to multiples of `min_count`.

    `declared` is the order of a pandas category: of all its levels where it `is_ordered` or all may be
    named, and else of those in `counts`.
    """

    kind: Kind
    unit: str = ""
    sums: Sums | None = None
    counts: Mapping[str, Count] | None = None
    declared: tuple[str, ...] = ()
    is_ordered: bool = False


@dataclass(frozen=True)
class OfGroups:
    """How many groups of one kind a client has, and group -> rows of those that it may name."""

    distinct: Count
    counts: Mapping[str, Count]


def of_columns(
    frame: pd.DataFrame,
    kinds: Mapping[str, Kind | None],
    client: str,
    least: int,
    agreed: frozenset[str],
) -> dict[str, OfColumn]:
    """Return a client's counts and sums of its columns, and no level of the `known` ones."""
    answers = {}
    for name, kind_read in kinds.items():
        unit = str(frame.attrs.get("units", {}).get(name, ""))
        if name in agreed:
            answers[name] = OfColumn("category", unit, None, {})
            continue
        check_column(frame, name, client)  # a frame of one client may lack the column of clients
        kind = kind_read or kind_of(frame[name], name, client)
        if kind_read is None and pd.api.types.infer_dtype(frame[name]) == "boolean":
            kind = "category"
        if kind == "number":
            values = number_column(frame[name], name, client)  # mi() allows missing ones
            answers[name] = OfColumn("number", unit, told(values[np.isfinite(values)], least))
            continue
        counts = Counter(named(frame[name], name, client).tolist())
        seen = {level: rounded_count(n, least) for level, n in counts.items() if n >= least}
        declared, is_ordered = list[str](), False
        if hasattr(frame[name], "cat"):
            is_ordered = bool(frame[name].cat.ordered)
            declared = [level_name(value) for value in frame[name].cat.categories]
            if not is_ordered and least > 1:  # the name of a rare level stays here
                declared = [level for level in declared if level in seen]
        answers[name] = OfColumn("category", unit, None, seen, tuple(declared), is_ordered)
    return answers


def of_groups(
    frame: pd.DataFrame, by: tuple[str, ...], clients: str, client: str, least: int
) -> OfGroups:
    """Return a client's counts of groups; names of groups within clients stay there."""
    own = tuple(name for name in by if name != clients)
    for name in own:
        values = numbers(frame[name]) if frame[name].dtype.kind == "f" else np.zeros(0)
        if (decimals := values[values % 1.0 != 0.0]).size:
            raise column_fault(
                f"holds the number {decimals[0]:.6g}, and stands behind a bar, where groups do: write "
                f"({name} | {clients}), or make it a category",
                "holds a number with decimals, and stands behind a bar",
                name,
                client,
            )
    names = group_names(frame, own, client)
    counts = Counter(names.tolist())
    if clients in by:
        return OfGroups(len(counts), {})
    return OfGroups(
        len(counts), {n: rounded_count(rows, least) for n, rows in counts.items() if rows >= least}
    )


def group_names(frame: pd.DataFrame, by: tuple[str, ...], client: str) -> Any:
    """Return the group of each row, (n,): the columns' values, joined by an unescaped ":"."""
    names = [named(frame[name], name, client) for name in by]
    if not names:
        return np.full(len(frame), "", dtype=np.str_)
    if len(names) > 1:
        names = [np.char.replace(np.char.replace(p, "\\", "\\\\"), ":", "\\:") for p in names]
    joined = names[0]
    for part in names[1:]:
        joined = np.char.add(np.char.add(joined, ":"), part)
    return joined


# ------------------------------------------------------------ the formula's parts
@dataclass(frozen=True)
class OfCall:
    """A client's sums of a transform's argument; `more`: counts of `bs`, powers of `poly`."""

    sums: Sums
    more: tuple[float, ...] = ()


def argument_of(call: Call, schema: Schema, frame: pd.DataFrame, client: str) -> Any:
    """Return the values of a transform's argument, (n,), all finite."""
    ready = prepared(frame, schema.columns, client)
    with np.errstate(all="ignore"):  # what is not finite is refused by name below
        read = value_of(call.args[0], ready, schema.transforms)
    if hasattr(read, "cat") or getattr(read, "ndim", 0) != 1:
        fix = "make a column of it first"
        raise ValueError(f"'{call}' needs one column of numbers, not '{call.args[0]}': {fix}")
    values = np.asarray(read, dtype=np.float64)
    if not np.isfinite(values).all():
        row = int((~np.isfinite(values)).argmax())
        raise ValueError(
            f"'{call}' is not finite in row {row} of client '{client}': correct the row"
        )
    return values


def of_call(
    call: Call, schema: Schema, frame: pd.DataFrame, client: str, at: tuple[float, float] | None
) -> OfCall:
    """Return a client's sums of a transform's argument, and more once mean and sd are agreed."""
    values = argument_of(call, schema, frame, client)
    if at is None:
        return OfCall(told(values, schema.min_count))
    if STATEFUL[call.callee].needs == "counts":
        return OfCall(told(values, schema.min_count), counted(values, *at, schema.min_count))
    degree = int(options_of(call)["degree"])
    values = coarse(values, schema.min_count, 2 * degree)
    return OfCall(sums(values), powers(values, *at, degree))


@dataclass(frozen=True)
class OfDesign:
    """Sums of the columns of all terms, and of a numeric response; `constant` columns have one value in all rows."""

    columns: Mapping[str, Sums]
    constant: frozenset[str]
    response: Sums | None


def of_design(
    designs: Sequence[Design],
    declared: Declaration,
    schema: Schema,
    frame: pd.DataFrame,
    client: str,
) -> OfDesign:
    """Return a client's sums of the columns of all terms, the common ones first, and of the response."""
    rows, rows_known = prepared(frame, schema.columns, client), dict[str, Any]()
    if declared.imputed:
        from hierfl.formulas.imputed import filled, known_values

        rows, gone = filled(declared.imputed, rows)
        rows_known = known_values(designs, rows, gone, client)
    columns: dict[str, NDArray[np.float64]] = {}
    for design in designs:
        matrix, offset = design.evaluate(rows, client)
        for name, values in zip(design.columns, matrix.T, strict=True):
            columns.setdefault(name, values)
        if design is designs[0] and design.offsets:
            columns[OFFSET] = offset
    for name in rows_known.keys() & columns.keys():
        columns[name] = columns[name][rows_known[name]]
    constant = {
        name
        for name, values in columns.items()
        if len(np.unique(coarse(values, schema.min_count))) < 2
    }
    curves: dict[Any, list[str]] = {}
    for term in (term for design in designs for term in design.terms):
        curves.setdefault(term.parts, []).extend(term.columns)
    several = [names for names in curves.values() if len(names) > 1]
    found_sums = told_together(columns, several, schema.min_count, rows_known.keys())
    labels, total = declared.parts.labels, None
    if len(labels) == 1 and schema.columns[labels[0]].kind == "number":
        values = rows[labels[0]].to_numpy()
        if "trials" in declared.parts.additions:
            trials = rows[declared.parts.additions["trials"]].to_numpy()
            if (trials <= 0.0).any():
                raise RowsFault(
                    f"column '{declared.parts.additions['trials']}' of client '{client}' has no "
                    f"trials in row {int((trials <= 0.0).argmax())}: leave the row out",
                    f"column '{declared.parts.additions['trials']}' has a row without trials",
                )
            values = values / trials
        total = told(values, schema.min_count)
    return OfDesign(found_sums, frozenset(constant), total)
