"""What clients are asked while they agree on a schema, and their answers, also as JSON.

    rows      how many rows
    columns   sums of a number; counts of a category's levels
    outside   whether rows have levels or groups that are not among the agreed ones, 1 or 0
    groups    how many groups, and counts of those that may be named
    call      sums of a transform's argument; then counts or sums of powers in units of them
    design    sums of the columns of all terms and of the response

A client answers by `hierfl.formulas.answers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    group_names,
    of_call,
    of_columns,
    of_design,
    of_groups,
)
from hierfl.formulas.columns import Kind as KindOfColumn
from hierfl.formulas.columns import complete
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.design import every_design_of
from hierfl.formulas.disclosure import coarse_frame
from hierfl.formulas.expressions import Call
from hierfl.formulas.plausible import check_schema, stateful_calls
from hierfl.formulas.schema import Schema

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

    def json(self) -> str:
        """Return the question as JSON."""
        return written(self)


Ask = Callable[[Question], Mapping[str, Any]]  # -> client: its answer
Answering = Callable[[pd.DataFrame, str], Any]


def answering(
    question: Question, clients: str, kinds: Kinds, declared: Declaration | None
) -> Answering:
    """Return the function of a client's frame and name that answers a question of this formula."""
    least, by, schema = question.least, question.by, question.schema
    if question.kind == "rows":
        return lambda frame, client: len(frame)
    if question.kind == "columns":
        agreed_levels = frozenset(question.known)
        return lambda frame, client: of_columns(
            coarse_frame(frame, kinds, declared, least), kinds, client, least, agreed_levels
        )
    allowed = {*kinds, *(declared.rows_of if declared else ())}
    if question.kind in ("outside", "groups"):
        if not set(by) <= {*allowed, clients}:
            raise ValueError(f"the question reads {', '.join(by)}, which the formula does not")
        if question.kind == "outside":
            agreed = question.levels  # whether there are others; how many is not needed
            return lambda frame, client: int(
                not np.isin(group_names(frame, by, client), agreed).all()
            )
        return lambda frame, client: of_groups(frame, by, clients, client, least)
    assert declared is not None and schema is not None

    def coarsely(frame: pd.DataFrame) -> Any:
        return coarse_frame(frame, kinds, declared, schema.min_count)

    if question.kind == "call":
        call = call_of(declared, question.text)
        return lambda frame, client: of_call(call, schema, coarsely(frame), client, question.at)
    designs = every_design_of(declared, schema)
    return lambda frame, client: of_design(designs, declared, schema, coarsely(frame), client)


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
    if declared.imputed:
        from hierfl.formulas.imputed import with_known

        whole = with_known(whole, declared, client, least)
    return whole


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
    least = question.least if question.schema is None else question.schema.min_count
    whole = own_rows(declared, frame, client, least)
    if question.schema is not None:
        check_schema(
            declared,
            question.schema,
            whole,
            client,
            least,
            start=start,
            text=question.text,
            at=question.at,
        )
    answer = answering(question, declared.clients, declared.columns, declared)(whole, client)
    return answer


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
        raise ValueError(f"it is no answer to '{question.kind}' ({error})") from error
