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

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from formulae.terms.call_resolver import LazyCall

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
from hierfl.formulas.design import designs_of, every_design_of
from hierfl.formulas.parse import Declaration
from hierfl.formulas.schema import Schema
from hierfl.formulas.terms import calls, with_constants
from hierfl.formulas.transforms import STATEFUL, Sums

Kind = Literal["rows", "columns", "outside", "groups", "call", "design"]
Kinds = Mapping[str, KindOfColumn | None]


@dataclass(frozen=True)
class Question:
    """A question to every client.

    `known` columns have agreed levels; `by` are the columns of "outside" and "groups"; `text` and
    `at` are a call and the mean and sd of its argument.
    """

    kind: Kind
    least: int = 1
    known: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    text: str = ""
    at: tuple[float, float] | None = None
    schema: Schema | None = None

    def json(self) -> str:
        """Return the question as JSON."""
        whole = {**asdict(self), "schema": None if self.schema is None else self.schema.json()}
        return json.dumps(whole, allow_nan=False)

    @staticmethod
    def of_json(text: str | bytes) -> Question:
        """Return the question of a text, or raise ValueError."""
        try:
            found = json.loads(text)
            schema = None if found["schema"] is None else Schema.of_json(found["schema"])
            names = {name: _names(found[name]) for name in ("known", "by", "levels")}
            at = None if found["at"] is None else (float(found["at"][0]), float(found["at"][1]))
            text, least = str(found["text"]), _whole(found["least"])
            asked = Question(found["kind"], least, text=text, at=at, schema=schema, **names)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"it is no question about rows ({type(error).__name__}: {error})"
            ) from error
        needs = asked.kind in ("call", "design") and schema is None
        if asked.kind not in get_args(Kind) or asked.least < 1 or needs:
            raise ValueError(f"it is no question about rows: {asked.kind!r} of {asked.least!r}")
        return asked


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
        known = frozenset(question.known)
        return lambda frame, client: of_columns(frame, kinds, client, least, known)
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
    if question.kind == "call":
        call = call_of(declared, schema, question.text)
        return lambda frame, client: of_call(call, schema, frame, client, question.at)
    designs = (every_design_of if ";" in declared.text else designs_of)(declared, schema)
    return lambda frame, client: of_design(designs, declared, schema, frame, client)


def call_of(declared: Declaration, schema: Schema, text: str) -> LazyCall:
    """Return a transform of the formula, with the constants of the transforms inside it."""
    for found in declared.described:
        for call in calls(with_constants(found, schema.transforms)):
            if call.callee in STATEFUL and str(call) == text:
                return call
    raise ValueError(f"the formula has no transform '{text}'")


# ------------------------------------------------------------ clients elsewhere
def json_answer(question: Question, declared: Declaration, frame: pd.DataFrame, client: str) -> Any:
    """Return a client's answer to a question as JSON; `declared` is its own copy of the formula."""
    whole = complete(frame, declared.rows_of, client, declared.missing)
    if "mi(" in declared.text:
        from hierfl.formulas.imputed import with_known

        least = question.least if question.schema is None else question.schema.min_count
        whole = with_known(whole, declared, client, least)
    answer = answering(question, declared.clients, declared.columns, declared)(whole, client)
    if isinstance(answer, int):
        return answer
    if isinstance(answer, dict):
        return {name: asdict(part) for name, part in answer.items()}
    if isinstance(answer, OfDesign):
        return {**asdict(answer), "constant": sorted(answer.constant)}
    return asdict(answer)


def answer_of_json(question: Question, found: Any) -> Any:
    """Return the answer of some JSON that `json_answer` made, or raise ValueError."""
    try:
        if question.kind in ("rows", "outside"):
            return _whole(found)
        if question.kind == "columns":
            return {str(name): _column(part) for name, part in found.items()}
        if question.kind == "groups":
            return OfGroups(_whole(found["distinct"]), _counts(found["counts"]))
        if question.kind == "call":
            return OfCall(_sums(found["sums"]), tuple(float(n) for n in found["more"]))
        response = found["response"]
        return OfDesign(
            {str(name): _sums(part) for name, part in found["columns"].items()},
            frozenset(_names(found["constant"])),
            None if response is None else _sums(response),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"it is no answer to '{question.kind}' ({type(error).__name__}: {error})"
        ) from error


def _column(found: Any) -> OfColumn:
    if found["kind"] not in get_args(KindOfColumn):
        raise ValueError(f"a column is {found['kind']!r}")
    return OfColumn(
        found["kind"],
        str(found["unit"]),
        None if found["sums"] is None else _sums(found["sums"]),
        None if found["counts"] is None else _counts(found["counts"]),
        _names(found["declared"]),
        bool(found["is_ordered"]),
    )


def _sums(found: Any) -> Sums:
    made = Sums(_whole(found["count"]), float(found["total"]), float(found["squares"]))
    if not abs(made.total) + made.squares < float("inf"):
        raise ValueError("a sum is not finite")
    return made


def _counts(found: Any) -> dict[str, int]:
    return {str(name): _whole(count) for name, count in found.items()}


def _whole(found: Any) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ValueError(f"{found!r} is no count")
    return found


def _names(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{found!r} is no list of names")
    return tuple(found)
