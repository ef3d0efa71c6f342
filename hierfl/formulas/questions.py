"""Questions that clients are asked about a schema, and whether one that a server sends can be what they agreed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from msgspec import Meta

from hierfl.core.typed_json import Count, made_of, written
from hierfl.formulas.answers import (
    OfCall,
    OfColumn,
    OfDesign,
    OfGroups,
    Slices,
    argument_of,
    group_names,
    of_call,
    of_columns,
    of_design,
    of_groups,
)
from hierfl.formulas.columns import Kind as KindOfColumn
from hierfl.formulas.columns import (
    OneFrame,
    column_fault,
    complete,
    ends_of,
    joined,
    number_column,
    prepared,
)
from hierfl.formulas.constants import STATEFUL, Implausible, check_constants, check_moments
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.design import every_design_of
from hierfl.formulas.disclosure import (
    EXACT,
    NEARLY,
    SHARE,
    coarse_frame,
    isolated,
    singled_out,
    told,
)
from hierfl.formulas.expressions import Call, calls_within
from hierfl.formulas.imputed import filled, known_values, with_known
from hierfl.formulas.schema import OFFSET, Schema
from hierfl.formulas.terms import options_of
from hierfl.formulas.transforms import Constants, sums

FEW = (
    "{} sets apart fewer than {} rows of this client: leave its term out, merge its levels, have a "
    "column of its logarithm, or let the node's owner lower min_count"
)


def stateful_calls(declared: Declaration) -> list[Call]:
    """Return a formula's transforms, inner ones first."""
    return [call for call in declared.calls if call.callee in STATEFUL]


def check_schema(
    declared: Declaration,
    schema: Schema,
    frame: pd.DataFrame,
    client: str,
    least: int,
    *,
    start: Schema | None = None,
    text: str = "",
    at: tuple[float, float] | None = None,
) -> None:
    """Refuse a schema with constants that a formula or the client's rows cannot have (`Implausible`).

    Columns as those of `start`, the owner's own schema, are taken as they are. Of a call that is
    asked about, `text`, there are none yet but the mean and sd, `at`.
    """
    told_of = coarse_frame(frame, declared.columns, declared, least)
    is_own = start is not None and start.columns == schema.columns
    for name, column in () if is_own else schema.columns.items():
        if column.kind == "number" and name in told_of:
            values: Any = number_column(told_of[name], name, client)
            own = sums(values[pd.notna(values)])
            check_moments(name, column.mean, column.sd, own, schema.rows, constant=True)
    every = {str(call): call for call in stateful_calls(declared)}
    if text and text not in every:
        raise Implausible(f"the formula has no transform '{text[:200]}'")
    within = calls_within(every[text]) if text else every.values()
    needed = {str(call) for call in within if call.callee in STATEFUL} - {text}
    if not needed <= schema.transforms.keys() or not schema.transforms.keys() <= {*every} - {text}:
        raise Implausible("the schema has constants of other transforms than the formula")
    for key in [*schema.transforms, *([text] if text and at else [])]:
        values = argument_of(every[key], schema, told_of, client)
        constants = schema.transforms.get(key) or Constants(*(at or (0.0, 1.0)))
        own = told(values, least)
        check_moments(key, constants.mean, constants.sd, own, schema.rows)
        if key != text:
            kind = every[key].callee
            check_constants(kind, key, constants, options_of(every[key]), values, least)


def design_matrix(declared: Declaration, schema: Schema, frame: pd.DataFrame, client: str) -> Any:
    """Return the columns of all terms on a client's rows, (n, p), whatever `mi()` lacks filled."""
    ready = prepared(frame, schema.columns, client)
    if declared.imputed:
        ready, _ = filled(declared.imputed, ready)
    designs = every_design_of(declared, schema)
    return np.hstack([np.zeros((len(ready), 0)), *(d.evaluate(ready, client)[0] for d in designs)])


def check_design(formula: Any, frame: pd.DataFrame, client: str, least: int) -> None:
    """Refuse a design whose columns, some combination of them or some of its groups are of a few rows (`Implausible`).

    X'X and X'y of a column that is the same in all but a few rows have those rows' values of all others:
    DataSHIELD's rule for `ds.glm`. So have those of x and of x + 1000 (age > 96), by their difference.
    `formula` is a `Formula` with the schema.
    """
    declared, schema = formula.declared, formula.agreed
    ready = prepared(frame, schema.columns, client)
    numbers_of = [name for name, column in schema.columns.items() if column.kind == "number"]
    # what the schema has told of these is of other values where they set rows apart
    read = {name: ready[name][ready[name].notna()].to_numpy(np.float64) for name in numbers_of}
    rows_known: dict[str, Any] = {}
    if declared.imputed:
        ready, gone = filled(declared.imputed, ready)
        rows_known = known_values(every_design_of(declared, schema), ready, gone, client)
    columns: dict[str, Any] = {}
    for layout in formula.layouts:
        matrix, offset = layout.common.evaluate(ready, client)
        columns |= dict(zip(layout.common.columns, matrix.T, strict=True))
        columns |= {OFFSET: offset} if layout.common.offsets else {}
        for term in layout.at("crossed"):
            names = group_names(frame, term.group.by, client)
            if others := {*names.tolist()} - {*term.levels}:
                what, public = (
                    f"has the group {min(others)}",
                    "has a group that is not an agreed one",
                )
                raise column_fault(what, public, ":".join(term.group.by), client)
            for name in np.unique(names).tolist():
                own = (names == name)[:, None] * term.evaluate(ready, client)
                labels = (f"{part} of {term.site} '{name}'" for part in term.columns)
                columns |= dict(zip(labels, own.T, strict=True))
    additions = declared.parts.additions
    for label in (*declared.parts.labels, *filter(None, [additions.get("weights")])):
        if schema.columns[label].kind == "number":
            columns[label] = ready[label].to_numpy(np.float64)
    names_of = [label for label in declared.parts.labels if schema.columns[label].kind != "number"]
    beside = {n: of for name in (*names_of, *additions.values()) for n, of in _added(ready[name])}
    made = {n: of[rows_known[n]] if n in rows_known else of for n, of in columns.items()}
    as_it_is = {*declared.parts.labels, *beside}
    for share, every in ((SHARE, read), (NEARLY, {**made, **beside})):
        for name, values in every.items():
            if len(singled_out(values, least, by_value=name not in as_it_is, share=share)):
                raise Implausible(FEW.format(f"the column '{name}'", least))
    whole = [values for name, values in columns.items() if name not in rows_known]
    if whole and len(isolated(np.stack(whole, axis=1), least, EXACT)):
        raise Implausible(FEW.format("a combination of its columns", least))


def _added(column: pd.Series[Any]) -> Iterator[tuple[str, Any]]:
    """Yield what stands beside numbers, (n,), by level: X'y of an event that few rows have is of their covariates."""
    if not hasattr(column, "cat"):
        yield str(column.name), np.nan_to_num(column.to_numpy(np.float64))
        return
    for level in column.cat.categories:
        yield f"{column.name}[{level}]", (column == level).to_numpy(np.float64)


Kind = Literal["rows", "columns", "outside", "groups", "call", "design"]
Kinds = Mapping[str, KindOfColumn | None]


@dataclass(frozen=True)
class Question:
    """A question to every client.

    `known` columns have agreed levels; `by` are the columns of "outside" and "groups"; `text` and
    `at` are a call and the mean and sd of its argument.
    """

    kind: Kind
    least: Annotated[int, Meta(ge=1)] = 1
    known: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    text: str = ""
    at: tuple[float, float] | None = None
    schema: Schema | None = None

    @property
    def min_count(self) -> int:
        """The rows of a level that may be named."""
        return self.least if self.schema is None else self.schema.min_count

    def json(self) -> str:
        """Return the question as JSON."""
        return written(self)


Ask = Callable[[Question], Mapping[str, Any]]  # -> client: its answer
Frames = Mapping[str, pd.DataFrame]


def answers_of(
    question: Question, clients: str, kinds: Kinds, declared: Declaration | None, frames: Frames
) -> dict[str, Any]:
    """Return each client's answer; columns of one frame, in which clients follow each other, are read once."""
    least = question.min_count
    answer, names = _answering(question, clients, kinds, declared, least), [*frames]
    is_apart = least > 1 or (declared is not None and declared.imputed)  # what rows reveal
    if len(names) > 1 and not is_apart and _has_one_source(frames):
        whole, ends = joined(frames), ends_of(frames).tolist()
        whole.attrs = frames[names[0]].attrs
        with suppress(KeyError, TypeError, ValueError):  # of which client is found out below
            of_rows = answer(whole, names[0])
            pairs = zip(names, pairwise([0, *ends]), strict=True)
            return {name: of_rows(slice(*rows)) for name, rows in pairs}
    return {name: answer(frame, name)(slice(None)) for name, frame in frames.items()}


def _has_one_source(frames: Frames) -> bool:
    """Return whether all frames have the same columns, and read values of one kind the same way."""
    first, *others = [frames.whole] if isinstance(frames, OneFrame) else frames.values()
    columns, dtypes = first.columns, first.dtypes.tolist()
    if any(of.attrs != first.attrs for of in others):  # units
        return False
    return not any(dtype.kind == "O" and dtype.name == "object" for dtype in dtypes) and all(
        of.columns is columns or (of.columns.equals(columns) and of.dtypes.tolist() == dtypes)
        for of in others
    )


def _answering(
    question: Question, clients: str, kinds: Kinds, declared: Declaration | None, least: int
) -> Callable[[pd.DataFrame, str], Slices]:
    """Return the function of rows that answers a question of this formula for slices of them."""
    by, schema = question.by, question.schema
    if question.kind == "rows":
        return lambda frame, client: lambda rows: len(range(len(frame))[rows])
    if question.kind == "columns":
        agreed_levels = frozenset(question.known)
        return lambda frame, client: of_columns(
            coarse_frame(frame, kinds, declared, least), kinds, client, least, agreed_levels
        )
    if question.kind in ("outside", "groups"):
        if not set(by) <= {*kinds, *(declared.rows_of if declared else ()), clients}:
            raise ValueError(f"the question reads {', '.join(by)}, which the formula does not")
        if question.kind == "groups":
            return lambda frame, client: of_groups(frame, by, clients, client, least)

        def is_outside(frame: pd.DataFrame, client: str) -> Slices:
            is_agreed = np.isin(group_names(frame, by, client), question.levels)
            return lambda rows: int(not is_agreed[rows].all())  # how many is not needed

        return is_outside
    assert declared is not None and schema is not None
    if question.kind == "call":
        call = call_of(declared, question.text)
        return lambda frame, client: of_call(
            call, schema, coarse_frame(frame, kinds, declared, least), client, question.at
        )
    designs = every_design_of(declared, schema)
    return lambda frame, client: of_design(
        designs, declared, schema, coarse_frame(frame, kinds, declared, least), client
    )


def call_of(declared: Declaration, text: str) -> Call:
    """Return a transform of the formula."""
    for call in stateful_calls(declared):
        if str(call) == text:
            return call
    raise ValueError(f"the formula has no transform '{text}'")


# ------------------------------------------------------------ clients elsewhere
def own_rows(declared: Declaration, frame: pd.DataFrame, client: str, least: int) -> pd.DataFrame:
    """Return the rows of a client that a formula keeps, its covariates numbers or NaN."""
    whole = complete(frame, declared.rows_of, client, declared.missing)
    return with_known(whole, declared, client, least)


def own_answer(
    question: Question,
    declared: Declaration,
    frame: pd.DataFrame,
    client: str,
    start: Schema | None = None,
) -> Any:
    """Return a client's answer to a question; `declared` and `start` are of its own copy of the formula.

    Raises:
        Implausible: the question's schema is none that the client can have agreed on.
    """
    least = question.min_count
    whole = own_rows(declared, frame, client, least)
    if question.schema is not None:
        asked_of: dict[str, Any] = {"start": start, "text": question.text, "at": question.at}
        check_schema(declared, question.schema, whole, client, least, **asked_of)
    frames = {client: whole}
    return answers_of(question, declared.clients, declared.columns, declared, frames)[client]


ANSWERS: dict[Kind, Any] = {
    "rows": Count,
    "columns": dict[str, OfColumn],
    "outside": Count,
    "groups": OfGroups,
    "call": OfCall,
    "design": OfDesign,
}


def answer_of_json(question: Question, document: Any) -> Any:
    """Return the answer of some JSON that `written` made of `own_answer`'s, or raise ValueError."""
    try:
        return made_of(ANSWERS[question.kind], document)
    except ValueError as error:
        raise ValueError(f"it is not an answer to '{question.kind}' ({error})") from error
