"""Whether a schema that a server sends can be one that a client has agreed on, by the client's own rows."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pandas as pd

from hierfl.formulas.answers import argument_of
from hierfl.formulas.columns import number_column, prepared
from hierfl.formulas.constants import STATEFUL, Implausible, check_constants, check_moments
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.design import every_design_of
from hierfl.formulas.disclosure import coarse_frame, few_differ, told
from hierfl.formulas.expressions import Call, calls_within
from hierfl.formulas.schema import Schema
from hierfl.formulas.terms import calls, options_of
from hierfl.formulas.transforms import Constants


def stateful_calls(declared: Declaration) -> list[Call]:
    """Return a formula's transforms, inner ones first."""
    every = chain.from_iterable(map(calls, declared.described))
    return [call for call in every if call.callee in STATEFUL]


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
            own = told(values[pd.notna(values)], least)
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


def check_design(
    declared: Declaration, schema: Schema, frame: pd.DataFrame, client: str, least: int
) -> None:
    """Refuse a design with a column that is the same in all but a few rows of a client (`Implausible`).

    X'X of such a column has those rows' values of all others: DataSHIELD's rule for `ds.glm`.
    """
    ready = prepared(frame, schema.columns, client)
    rows_known: dict[str, Any] = {}
    designs = every_design_of(declared, schema)
    if declared.imputed:
        from hierfl.formulas.imputed import filled, known_values

        ready, gone = filled(declared.imputed, ready)
        rows_known = known_values(designs, ready, gone, client)
    for design in designs:
        for name, values in zip(design.columns, design.evaluate(ready, client)[0].T, strict=True):
            if few_differ(values[rows_known[name]] if name in rows_known else values, least):
                raise Implausible(
                    f"the column '{name}' is the same in all but fewer than {least} rows of this "
                    "client: leave its term out, merge its levels, or let the node's owner lower "
                    "min_count"
                )
