"""Questions that clients are asked about a schema, and whether one that a server sends can be what they agreed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from msgspec import Meta

from hierfl.core.typed_json import Count, Spread, Value, made_of, written
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
from hierfl.formulas.columns import OneFrame, ends_of, joined, number_column, sums
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.design import every_design_of
from hierfl.formulas.disclosure import coarse_frame, told
from hierfl.formulas.expressions import calls_within
from hierfl.formulas.read_rows import ReadRows
from hierfl.formulas.schema import (
    STATEFUL,
    Implausible,
    Schema,
    check_constants,
    check_moments,
)
from hierfl.formulas.signatures import arguments
from hierfl.formulas.transforms import Constants


def check_schema(
    rows: ReadRows,
    schema: Schema,
    *,
    start: Schema | None = None,
    text: str = "",
    at: tuple[float, float] | None = None,
) -> None:
    """Refuse a schema with constants that a formula or the client's rows cannot have (`Implausible`).

    Columns as those of `start`, the owner's own schema, are taken as they are. Of a call that is
    asked about, `text`, there are none yet but the mean and sd, `at`.
    """
    declared, told_of, client, least = rows.declared, rows.told, rows.client, rows.least
    is_own = start is not None and start.columns == schema.columns
    for name, column in () if is_own else schema.columns.items():
        if column.kind == "number" and name in told_of:
            values: Any = number_column(told_of[name], name, client)
            own = sums(values[pd.notna(values)])
            check_moments(name, column.mean, column.sd, own, schema.rows, constant=True)
    every = declared.transforms
    within = calls_within(declared.transform(text)) if text else every.values()
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
            check_constants(kind, key, constants, arguments(every[key]), values, least)


Kind = Literal["rows", "columns", "outside", "groups", "call", "design"]
Kinds = Mapping[str, KindOfColumn | None]
FIELDS: dict[Kind, tuple[str, ...]] = {
    "rows": (),
    "columns": ("least", "known"),
    "outside": ("by", "levels"),
    "groups": ("least", "by"),
    "call": ("least", "text", "at", "schema"),
    "design": ("least", "schema"),
}


@dataclass(frozen=True)
class Question:
    """A question to every client.

    `known` columns have agreed levels; `by` are the columns of "outside" and "groups"; `text` and
    `at` are a call and the mean and sd of its argument.
    """

    kind: Kind
    least: Annotated[int, Meta(ge=1, lt=1 << 26)] = 1
    known: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    text: str = ""
    at: tuple[Value, Spread] | None = None
    schema: Schema | None = None

    @property
    def min_count(self) -> int:
        """The rows of a level that may be named."""
        return self.least if self.schema is None else self.schema.min_count

    @property
    def has_own_fields(self) -> bool:
        """Whether it has a schema where its kind needs one, and no field of other kinds."""
        own, plain = FIELDS[self.kind], Question(self.kind, self.least)
        others = {field.name for field in fields(self)}.difference(own)
        lacks_schema = "schema" in own and self.schema is None
        return not lacks_schema and all(getattr(self, n) == getattr(plain, n) for n in others)

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

    def read(frame: pd.DataFrame) -> pd.DataFrame:
        return coarse_frame(frame, kinds, declared, least) if least > 1 else frame

    answer, names = _answering(question, clients, kinds, declared, read), [*frames]
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
    question: Question,
    clients: str,
    kinds: Kinds,
    declared: Declaration | None,
    read: Callable[[pd.DataFrame], pd.DataFrame],
) -> Callable[[pd.DataFrame, str], Slices]:
    """Return the function of rows that answers a question of this formula for slices of them, as `read` for sums."""
    by, schema, least = question.by, question.schema, question.min_count
    if question.kind == "rows":
        return lambda frame, client: lambda rows: len(range(len(frame))[rows])
    if question.kind == "columns":
        agreed = frozenset(question.known)
        return lambda frame, client: of_columns(read(frame), kinds, client, least, agreed)
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
        call = declared.transform(question.text)
        return lambda frame, client: of_call(call, schema, read(frame), client, question.at)
    designs = every_design_of(declared, schema)
    return lambda frame, client: of_design(designs, declared, schema, read(frame), client)


# ------------------------------------------------------------ clients elsewhere
def own_answer(question: Question, rows: ReadRows, start: Schema | None = None) -> Any:
    """Return a client's answer to a question; the formula of `rows`, and `start`, are of its own copy.

    Raises:
        Implausible: the question's schema is none that the client can have agreed on.
    """
    declared = rows.declared
    if question.schema is not None:
        check_schema(rows, question.schema, start=start, text=question.text, at=question.at)
    if question.kind == "design":
        return rows.told_design(question.schema).answer
    of = declared.clients, declared.columns, declared
    return _answering(question, *of, lambda frame: rows.told)(rows.own, rows.client)(slice(None))


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
