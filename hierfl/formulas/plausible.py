"""Whether a schema that a server sends can be one that a client has agreed on, by the client's own rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from hierfl.formulas.answers import argument_of, group_names
from hierfl.formulas.columns import number_column, prepared
from hierfl.formulas.constants import STATEFUL, Implausible, check_constants, check_moments
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.design import every_design_of
from hierfl.formulas.disclosure import EXACT, coarse_frame, few_differ, few_dominate, isolated, told
from hierfl.formulas.expressions import Call, calls_within
from hierfl.formulas.schema import OFFSET, Schema
from hierfl.formulas.terms import calls, options_of
from hierfl.formulas.transforms import Constants

FEW = (
    "{} fewer than {} rows of this client: leave its term out, merge its levels, take its logarithm, "
    "or let the node's owner lower min_count"
)


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


def design_matrix(declared: Declaration, schema: Schema, frame: pd.DataFrame, client: str) -> Any:
    """Return the columns of all terms on a client's rows, (n, p), whatever `mi()` lacks filled."""
    ready = prepared(frame, schema.columns, client)
    if declared.imputed:
        from hierfl.formulas.imputed import filled

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
    rows_known: dict[str, Any] = {}
    if declared.imputed:
        from hierfl.formulas.imputed import filled, known_values

        ready, gone = filled(declared.imputed, ready)
        rows_known = known_values(every_design_of(declared, schema), ready, gone, client)
    columns: dict[str, Any] = {}
    for layout in formula.layouts:
        matrix, offset = layout.common.evaluate(ready, client)
        columns |= dict(zip(layout.common.columns, matrix.T, strict=True))
        columns |= {OFFSET: offset} if layout.common.offsets else {}
        for term in layout.at("crossed"):
            names = group_names(frame, term.group.by, client)
            for name in np.unique(names).tolist():
                own = (names == name)[:, None] * term.evaluate(ready, client)
                labels = (f"{part} of {term.site} '{name}'" for part in term.columns)
                columns |= dict(zip(labels, own.T, strict=True))
    additions = declared.parts.additions
    for label in (*declared.parts.labels, *filter(None, [additions.get("weights")])):
        if schema.columns[label].kind == "number":
            columns[label] = ready[label].to_numpy(np.float64)
    beside = {name: values for of in additions.values() for name, values in _added(ready[of])}
    for name, values in (*beside.items(), *columns.items()):
        own = values[rows_known[name]] if name in rows_known else values
        if few_differ(own, least):
            raise Implausible(FEW.format(f"the column '{name}' is the same in all but", least))
        if few_dominate(own, least):
            raise Implausible(
                FEW.format(f"nearly all squares of the column '{name}' are of", least)
            )
    whole = [values for name, values in columns.items() if name not in rows_known]
    if whole and len(isolated(np.stack(whole, axis=1), least, EXACT)):
        raise Implausible(FEW.format("a combination of its columns is the same in all but", least))


def _added(column: pd.Series[Any]) -> Iterator[tuple[str, Any]]:
    """Yield what an addition to the response holds, (n,): X'y of an event that few rows have is of their covariates."""
    if not hasattr(column, "cat"):
        yield str(column.name), np.nan_to_num(column.to_numpy(np.float64))
        return
    for level in column.cat.categories:
        yield f"{column.name}[{level}]", (column == level).to_numpy(np.float64)
