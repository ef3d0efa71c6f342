"""Rows of a formula's predictor: made up at typical values, or those of a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.data.clients import ClientData
from hierfl.formulas.columns import Column, level_name, prepared
from hierfl.formulas.formula import Formula
from hierfl.formulas.layout import INTERCEPT, GroupTerm, Layout
from hierfl.formulas.terms import columns_of

Values = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Rows:
    """Columns of n rows, (n, P) and (n, q) a bar term, Intercept first; `codes`, `fields` (n,)."""

    common: Tensor
    offset: Tensor
    groups: Mapping[str, Tensor]
    codes: Mapping[str, Tensor] = field(default_factory=dict)
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    of_parameters: Mapping[str, Rows] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number n of rows."""
        return len(self.offset)

    @property
    def weights(self) -> Tensor:
        """How many times each row counts, (n,)."""
        return self.fields.get("weights", torch.ones(self.count, dtype=torch.float64))


# ------------------------------------------------------------ rows that are made up
def predictors(formula: Formula) -> dict[str, Column]:
    """Return the columns that the terms read, and what was agreed about each."""
    read = {name for found in formula.declared.described for name in columns_of(found)}
    return {name: formula.agreed.columns[name] for name in formula.declared.columns if name in read}


def typical(formula: Formula, at: Values | None, grid: Mapping[str, Sequence[Any]]) -> Rows:
    """Return rows at typical values (means, reference levels), or at those of `at`; `grid` has n values a column."""
    columns = predictors(formula)
    count = len(next(iter(grid.values()))) if grid else 1
    groups = [term for found in formula.layouts for term in found.groups]
    of_groups = {t.group.name: t for t in groups if t.place in ("above", "crossed")}
    given = dict(at or {})
    _check_names(formula, given, columns, of_groups)
    frame: dict[str, Any] = {}
    for name, column in columns.items():
        if name in grid:
            values = [checked(name, column, value) for value in grid[name]]
        elif name in given:
            values = [checked(name, column, given[name])] * count
        else:
            values = [column.levels[0] if column.kind == "category" else column.mean] * count
        frame[name] = values
    codes = {
        term.site: torch.full((count,), _code(term, given[term.group.name]))
        for term in groups
        if term.group.name in given and term.group.name in of_groups
    }
    made = pd.DataFrame(frame, index=range(count))
    try:
        return evaluated(formula, prepared(made, columns, ""), "", codes)
    except ValueError as error:
        where = {name: values for name, values in grid.items() if columns[name].kind == "number"}
        ends = ", ".join(f"{name} from {min(v):.4g} to {max(v):.4g}" for name, v in where.items())
        raise ValueError(
            f"a term is not finite at typical values{ends and f', with {ends}'} "
            f"({str(error).split(' in row')[0]}): give other values, by grid=, values= or at="
        ) from error


def _check_names(
    formula: Formula, at: Values, columns: Mapping[str, Column], groups: Mapping[str, GroupTerm]
) -> None:
    for name in at:
        if name == formula.clients and name not in columns:
            raise KeyError(f"at has '{name}', which names the clients: choose one by client=")
        if name not in columns and name not in groups:
            raise KeyError(
                f"at has '{name}', which the formula does not read: it reads "
                f"{', '.join([*columns, *groups]) or 'no columns'}"
            )


def checked(name: str, column: Column, value: Any) -> Any:
    """Return a user's value of a column: a finite number, or the name of a level."""
    if column.kind == "category":
        text = level_name(value)
        if text not in column.levels:
            raise ValueError(
                f"'{name}' has no level {text!r}: its levels are {', '.join(column.levels)}"
            )
        return text
    if not isinstance(value, Real):
        raise TypeError(f"'{name}' is {value!r}, and the column holds numbers: give a number")
    number = float(value)
    if not np.isfinite(number):
        raise ValueError(f"'{name}' is {number}: give a finite number")
    return number


def _code(term: GroupTerm, value: Any) -> int:
    name = level_name(value)
    if name not in term.levels:
        raise ValueError(
            f"'{term.group.name}' has no group {name!r}: its groups are "
            f"{', '.join(term.levels[:8])}"
        )
    return term.levels.index(name)


def evaluated(
    formula: Formula, ready: pd.DataFrame, client: str, codes: Mapping[str, Tensor]
) -> Rows:
    """Return rows from a client's `prepared` columns."""
    made = []
    for found in formula.layouts:
        common, offset = found.common.evaluate(ready, client)
        groups = {term.site: torch.as_tensor(term.evaluate(ready, client)) for term in found.groups}
        made.append(Rows(torch.as_tensor(common), torch.as_tensor(offset), groups, codes))
    return _together(formula, made)


def _together(formula: Formula, made: Sequence[Rows]) -> Rows:
    """Return the rows of the response's terms, with those of parameters."""
    if len(made) == 1:
        return made[0]
    return replace(made[0], of_parameters=dict(zip(formula.parameters, made[1:], strict=True)))


# ------------------------------------------------------------ a client's rows
def rows_of_client(formula: Formula, data: ClientData, client: int) -> Rows:
    """Return the rows of one client, by its position, from the fields that its program reads."""
    return _together(formula, [_of_layout(found, data, client) for found in formula.layouts])


def _of_layout(found: Layout, data: ClientData, client: int) -> Rows:
    place = slice(int(data.offsets[client]), int(data.offsets[client + 1]))
    count = place.stop - place.start
    fields = {name: value[place] for name, value in data.fields.items()}
    for name in fields:
        if name.startswith("has_") and not bool(fields[name].all()):
            raise ValueError(
                f"client '{data.names[client]}' has {int((fields[name] == 0).sum())} rows without "
                f"'{name[4:]}', which mi() imputes, and this is asked of rows that have it: give such "
                "rows, or take fit.predict, which averages over what is missing"
            )
    above = {name: value[client] for name, value in data.client_fields.items()}
    ones = torch.ones(count, 1, dtype=torch.float64)
    groups = {
        term.site: ones if term.is_single else fields[term.field].double()
        for term in found.groups
        if term.place != "above"
    }
    columns: dict[str, Tensor] = {INTERCEPT: ones[:, 0]}
    for j, name in enumerate(found.read):
        columns[name] = fields[f"x{found.suffix}"][:, j].double()
    for j, name in enumerate(found.steps):
        columns[name] = fields["steps"][:, j].double()
    for j, name in enumerate(found.above):
        columns[name] = above[f"above{found.suffix}"][j].double().expand(count)
    for name, term in found.own.items():
        columns[name] = groups[term.site][:, term.columns.index(name)]
    codes = {}
    for term in found.groups:
        if term.place == "above":
            groups[term.site] = _columns_above(term, columns, fields.get(term.field))
            codes[term.site] = above[term.index].long().expand(count)
        elif term.place != "clients":
            codes[term.site] = fields[term.index].long()
    common = [columns[name] for name in found.common.columns]
    return Rows(
        torch.stack(common, 1) if common else ones[:, :0],
        fields["offset"].double() if found.common.offsets else torch.zeros_like(ones[:, 0]),
        groups,
        codes,
        {n: fields[n].double() for n in ("y", "trials", "weights") if n in fields},
    )


def _columns_above(term: GroupTerm, known: Mapping[str, Tensor], left: Tensor | None) -> Tensor:
    """Return a term's columns, (n, q), where its own field `left` lacks those that other terms have."""
    found = [
        known[name] if name in known or left is None else left[:, j].double()
        for j, name in enumerate(term.columns)
    ]
    return torch.stack(found, 1)
