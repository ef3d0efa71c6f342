"""What one client answers while clients agree on a schema: counts and sums of its rows alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from hierfl.core.typed_json import Count
from hierfl.data.consistency import RowsFault
from hierfl.formulas.columns import (
    ColumnSums,
    Kind,
    check_column,
    column_fault,
    holds_numbers,
    level_name,
    named,
    number_column,
    numbers,
    prepared,
    sums,
)
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.design import Design
from hierfl.formulas.disclosure import Floats, Told, coarse, singled_out, told, told_together
from hierfl.formulas.expressions import Call, value_of
from hierfl.formulas.imputed import filled, known_values
from hierfl.formulas.schema import OFFSET, STATEFUL, Implausible, Schema
from hierfl.formulas.signatures import arguments
from hierfl.formulas.table_answers import rounded_count
from hierfl.formulas.transforms import counted, powers


@dataclass(frozen=True)
class OfColumn:
    """What a client answers about a column: sums of a number, or counts of levels, to multiples of `min_count`.

    `declared` is the order of a pandas category: of all its levels where it `is_ordered` or all may be
    named, and else of those in `counts`.
    """

    kind: Kind
    unit: str = ""
    sums: ColumnSums | None = None
    counts: Mapping[str, Count] | None = None
    declared: tuple[str, ...] = ()
    is_ordered: bool = False


@dataclass(frozen=True)
class OfGroups:
    """How many groups of one kind a client has, and group -> rows of those that it may name."""

    distinct: Count
    counts: Mapping[str, Count]


Slices = Callable[[slice], Any]  # of one client's rows among all -> its answer


def of_columns(
    frame: pd.DataFrame,
    kinds: Mapping[str, Kind | None],
    client: str,
    least: int,
    agreed: frozenset[str],
) -> Slices:
    """Return clients' counts and sums of their columns, and no level of the `agreed` ones."""
    columns = {
        name: _of_column(frame, name, kind, client, least, name in agreed)
        for name, kind in kinds.items()
    }
    return lambda rows: {name: of(rows) for name, of in columns.items()}


def _of_column(
    frame: pd.DataFrame, name: str, kind: Kind | None, client: str, least: int, is_agreed: bool
) -> Slices:
    unit = str(frame.attrs.get("units", {}).get(name, ""))
    if is_agreed:
        return lambda rows: OfColumn("category", unit, None, {})
    check_column(frame, name, client)  # a frame of one client may lack that of clients
    if holds_numbers(frame[name], kind, name, client):
        values = number_column(frame[name], name, client)  # mi() allows missing ones

        def of_numbers(rows: slice) -> OfColumn:
            own = values[rows]
            return OfColumn("number", unit, sums(own[np.isfinite(own)]))

        return of_numbers
    names, declared, is_ordered = named(frame[name], name, client), list[str](), False
    if hasattr(frame[name], "cat"):
        is_ordered = bool(frame[name].cat.ordered)
        declared = [level_name(value) for value in frame[name].cat.categories]

    def of_levels(rows: slice) -> OfColumn:
        counts = Counter(names[rows].tolist())
        seen = {level: rounded_count(n, least) for level, n in counts.items() if n >= least}
        # the name of a rare level stays here
        listed = [n for n in declared if is_ordered or least == 1 or n in seen]
        return OfColumn("category", unit, None, seen, tuple(listed), is_ordered)

    return of_levels


def of_groups(
    frame: pd.DataFrame, by: tuple[str, ...], clients: str, client: str, least: int
) -> Slices:
    """Return clients' counts of groups; names of groups within clients stay there."""
    own = tuple(name for name in by if name != clients)
    for name in own:
        values = numbers(frame[name]) if frame[name].dtype.kind == "f" else np.zeros(0)
        if (decimals := values[values % 1.0 != 0.0]).size:
            fix = f"where groups belong: write ({name} | {clients}), or make it a category"
            what = f"holds the number {decimals[0]:.6g}, but is after a bar"
            public = "holds a number with decimals, but is after a bar"
            raise column_fault(f"{what}, {fix}", public, name, client)
    names = group_names(frame, own, client)

    def counted_groups(rows: slice) -> OfGroups:
        counts = Counter(names[rows].tolist())
        large = {} if clients in by else {n: k for n, k in counts.items() if k >= least}
        return OfGroups(len(counts), {n: rounded_count(k, least) for n, k in large.items()})

    return counted_groups


def group_names(frame: pd.DataFrame, by: tuple[str, ...], client: str) -> Any:
    """Return the group of each row, (n,): the columns' values, joined by an unescaped ":"."""
    names = [named(frame[name], name, client) for name in by]
    if not names:
        return np.full(len(frame), "", dtype=np.str_)
    if len(names) > 1:
        names = [np.char.replace(np.char.replace(p, "\\", "\\\\"), ":", "\\:") for p in names]
    return reduce(lambda joined, part: np.char.add(np.char.add(joined, ":"), part), names)


# ------------------------------------------------------------ the formula's parts
@dataclass(frozen=True)
class OfCall:
    """A client's sums of a transform's argument; `more`: counts of `bs`, powers of `poly`."""

    sums: ColumnSums
    more: tuple[float, ...] = ()


def argument_of(call: Call, schema: Schema, frame: pd.DataFrame, client: str) -> Any:
    """Return the values of a transform's argument, (n,), all finite."""
    ready = prepared(frame, schema.columns, client)
    with np.errstate(all="ignore"):  # what is not finite is refused by name below
        read = value_of(call.args[0], ready, schema.transforms)
    if hasattr(read, "cat") or getattr(read, "ndim", 0) != 1:
        what = f"'{call}' needs one column of numbers, not '{call.args[0]}'"
        raise ValueError(f"{what}: make a column of it first")
    values = np.asarray(read, dtype=np.float64)
    if not (finite := np.isfinite(values)).all():
        row = f"row {int((~finite).argmax())} of client '{client}'"
        what = f"'{call}' is not finite in"
        raise RowsFault(f"{what} {row}: correct the row", f"{what} some row")
    return values


def of_call(
    call: Call, schema: Schema, frame: pd.DataFrame, client: str, at: tuple[float, float] | None
) -> Slices:
    """Return clients' sums of a transform's argument, and more once mean and sd are agreed."""
    every, least = argument_of(call, schema, frame, client), schema.min_count

    def answer(rows: slice) -> OfCall:
        values = every[rows]
        if at is None:
            return OfCall(told(values, least))
        if STATEFUL[call.callee].needs == "counts":
            return OfCall(told(values, least), counted(values, *at, least))
        degree = int(arguments(call)["degree"])
        # from as many power sums as there are values, Newton's identities give all of these
        if len(singled_out(values, least, degree)) or 1 < least > len(values) - 2 * degree:
            raise Implausible(
                f"sums of the powers of '{call}' describe fewer than {least} rows of this client: lower "
                "the degree, or let the node's owner lower min_count"
            )
        return OfCall(told(values, least), powers(coarse(values, least), *at, degree))

    return answer


@dataclass(frozen=True)
class OfDesign:
    """Sums of the columns of all terms, and of a numeric response; `constant` columns have one value in all rows."""

    columns: Mapping[str, ColumnSums]
    constant: frozenset[str]
    response: ColumnSums | None


def of_design(
    designs: Sequence[Design],
    declared: Declaration,
    schema: Schema,
    frame: pd.DataFrame,
    client: str,
) -> Slices:
    """Return clients' sums of the columns of all terms, the common ones first, and of the response."""
    columns, response = design_columns(designs, declared, schema, frame, client)
    least = schema.min_count

    def answer(rows: slice) -> OfDesign:
        own = {name: values[rows] for name, values in columns.items()}
        label = None if response is None else response[rows]
        return ToldDesign.of(designs, own, label, least).answer

    return answer


class ToldDesign(NamedTuple):
    """What may be told of the columns of all terms, and a response of one number, (n,)."""

    columns: Told
    response: Any

    @staticmethod
    def of(
        designs: Sequence[Design], columns: Mapping[str, Floats], response: Any, least: int
    ) -> ToldDesign:
        """Return it of columns, (n,), with NaN where `mi()` lacks a value."""
        if least < 2:  # nothing is withheld
            every = {name: sums(values[np.isfinite(values)]) for name, values in columns.items()}
            return ToldDesign(Told(every, dict(columns), dict(columns)), response)
        curves: dict[Any, list[str]] = {}
        for term in (term for design in designs for term in design.terms):
            curves.setdefault(term.factors, []).extend(term.columns)
        several = [names for names in curves.values() if len(names) > 1]
        label = None if response is None else coarse(response, least, by_value=False)
        return ToldDesign(told_together(columns, several, least), label)

    @property
    def answer(self) -> OfDesign:
        """Return the sums."""
        there = {name: of[np.isfinite(of)] for name, of in self.columns.coarse.items()}
        constant = frozenset(name for name, of in there.items() if len(np.unique(of)) < 2)
        label = None if self.response is None else sums(self.response)
        return OfDesign(self.columns.sums, constant, label)


def design_columns(
    designs: Sequence[Design],
    declared: Declaration,
    schema: Schema,
    frame: pd.DataFrame,
    client: str,
) -> tuple[dict[str, Floats], Any]:
    """Return the columns of all terms, (n,), with NaN where `mi()` lacks a value, and a response of one number."""
    ready, rows_known = prepared(frame, schema.columns, client), dict[str, Any]()
    if declared.imputed:
        ready, gone = filled(declared.imputed, ready)
        rows_known = known_values(designs, ready, gone, client)
    columns: dict[str, Floats] = {}
    for design in designs:
        matrix, offset = design.evaluate(ready, client)
        for name, values in zip(design.columns, matrix.T, strict=True):
            columns.setdefault(name, values)
        if design is designs[0] and design.offsets:
            columns[OFFSET] = offset
    for name in rows_known.keys() & columns.keys():
        columns[name] = np.where(rows_known[name], columns[name], np.nan)
    return columns, _response(declared, schema, ready, client)


def _response(declared: Declaration, schema: Schema, ready: pd.DataFrame, client: str) -> Any:
    """Return a response of one number, (n,), of trials its share; None of another."""
    labels, trials_column = declared.parts.labels, declared.parts.additions.get("trials")
    if len(labels) > 1 or schema.columns[labels[0]].kind != "number":
        return None
    values = ready[labels[0]].to_numpy()
    if trials_column is None:
        return values
    trials = ready[trials_column].to_numpy()
    if (trials <= 0.0).any():
        what = f"has no trials in row {int((trials <= 0.0).argmax())}: leave the row out"
        raise column_fault(what, "has a row without trials", trials_column, client)
    return values / trials
