"""Rows of a formula's predictor: made up at typical values, or those of a client."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from hierfl.core.arguments import NoSuchName, expect, expect_kind
from hierfl.data.clients import ClientData
from hierfl.formulas.columns import Column, Kind, by_client, level_name, prepared
from hierfl.formulas.expressions import columns_of
from hierfl.formulas.formula import Formula, Frames
from hierfl.formulas.layout import GroupTerm, Layout
from hierfl.formulas.writer import INTERCEPT, NO_NAME

Values = Mapping[str, Any]
AT_ONCE = 4_000_000  # draws x rows whose responses are held at once
OF_ROWS = ("y", "trials", "weights", "cens", "upper", "entry")  # fields beside the columns


@dataclass(frozen=True, eq=False)
class DesignRows:
    """Columns of n rows, (n, P) and (n, q) a bar term, Intercept first; `codes`, `fields` (n,)."""

    common: Tensor
    offset: Tensor
    groups: Mapping[str, Tensor]
    codes: Mapping[str, Tensor] = field(default_factory=dict)
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    of_parameters: "Mapping[str, DesignRows]" = field(default_factory=dict)
    lacking: "Mapping[str, Lacking]" = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number n of rows."""
        return len(self.offset)

    @property
    def weights(self) -> Tensor:
        """How many times each row counts, (n,)."""
        return self.fields.get("weights", torch.ones(self.count, dtype=torch.float64))

    def at(self, place: slice | Tensor) -> "DesignRows":
        """Return some of the rows."""
        groups, codes, fields = (
            {name: value[place] for name, value in of.items()}
            for of in (self.groups, self.codes, self.fields)
        )
        others = {name: own.at(place) for name, own in self.of_parameters.items()}
        lacking = {
            name: Lacking(of.gone[place], of.step.at(place), of.values[:, place])
            for name, of in self.lacking.items()
        }
        common, offset = self.common[place], self.offset[place]
        return DesignRows(common, offset, groups, codes, fields, others, lacking)


@dataclass(frozen=True, eq=False)
class Lacking:
    """A covariate that rows lack, (n,): what a unit adds to their columns, and its draws, (S, n); 0 in others."""

    gone: Tensor
    step: DesignRows
    values: Tensor


def in_turn(rows: DesignRows, draws: int, at_once: int = AT_ONCE) -> Iterator[DesignRows]:
    """Yield a client's rows in blocks whose responses at all draws fit into memory."""
    size = max(1, at_once // draws)
    for first in range(0, rows.count, size):
        yield rows.at(slice(first, first + size))


# ------------------------------------------------------------ rows that are made up
def predictors(formula: Formula) -> dict[str, Column]:
    """Return the columns that the terms read, and what was agreed about each."""
    read = {name for terms in formula.declared.described for name in columns_of(terms)}
    return {name: formula.agreed.columns[name] for name in formula.declared.columns if name in read}


def typical(formula: Formula, at: Values | None, grid: Mapping[str, Sequence[Any]]) -> DesignRows:
    """Return rows at typical values (means, reference levels), or at those of `at`; `grid` has n values per column."""
    columns = predictors(formula)
    count = len(next(iter(grid.values()))) if grid else 1
    groups = [term for layout in formula.layouts for term in layout.groups]
    of_groups = {t.group.name: t for t in groups if t.place in ("above", "crossed")}
    expect_kind(at or {}, Mapping, "at", "give a dict, column -> value, {'age': 60}")
    held = dict(at or {})
    _check_names(formula, held, columns, of_groups)
    frame: dict[str, Any] = {}
    for name, column in columns.items():
        if name in grid:
            values = [checked(name, column, value) for value in grid[name]]
        elif name in held:
            values = [checked(name, column, held[name])] * count
        else:
            values = [column.levels[0] if column.kind == "category" else column.mean] * count
        frame[name] = values
    codes = {
        term.site: torch.full(
            (count,), _place(term.group.name, "group", term.levels, held[term.group.name])
        )
        for term in groups
        if term.group.name in held and term.group.name in of_groups
    }
    made = pd.DataFrame(frame, index=range(count))
    try:
        return evaluated(formula, prepared(made, columns, ""), "", codes)
    except ValueError as error:
        why = str(error).split(" in row")[0]
        raise ValueError(f"{why}: give other values, by grid=, values= or at=") from error


def _check_names(
    formula: Formula, at: Values, columns: Mapping[str, Column], groups: Mapping[str, GroupTerm]
) -> None:
    for name in at:
        if name not in columns and name not in groups:
            reads = f"it reads {', '.join([*columns, *groups]) or 'no columns'}"
            fix = "choose a client by client=" if name == formula.clients else reads
            raise NoSuchName(
                f"at has '{name}', which is not a column that the formula reads: {fix}"
            )


def checked(name: str, column: Column, value: Any) -> Any:
    """Return a user's value of a column: a finite number, or the name of a level."""
    if column.kind == "category":
        return column.levels[_place(name, "level", column.levels, value)]
    expect_kind(value, Real, f"'{name}'", "the column holds numbers, so give a number")
    expect(**{name: (float(value), "(-inf, inf)")})
    return float(value)


def _place(name: str, what: str, levels: Sequence[str], value: Any) -> int:
    """Return the place of a level or a group among those of a column."""
    text = level_name(value)
    if text not in levels:
        there = ", ".join(levels[:8])
        raise ValueError(f"'{name}' has no {what} {text!r}: its {what}s are {there}")
    return levels.index(text)


def evaluated(
    formula: Formula, ready: pd.DataFrame, client: str, codes: Mapping[str, Tensor]
) -> DesignRows:
    """Return rows from a client's `prepared` columns."""
    made = []
    for layout in formula.layouts:
        common, offset = layout.common.evaluate(ready, client)
        groups = {
            term.site: torch.as_tensor(term.evaluate(ready, client)) for term in layout.groups
        }
        made.append(DesignRows(torch.as_tensor(common), torch.as_tensor(offset), groups, codes))
    return _together(formula, made)


def _together(formula: Formula, made: Sequence[DesignRows]) -> DesignRows:
    """Return the rows of the response's terms, with those of parameters."""
    if len(made) == 1:
        return made[0]
    return replace(made[0], of_parameters=dict(zip(formula.parameters, made[1:], strict=True)))


# ------------------------------------------------------------ a client's rows
def data_of(
    formula: Formula, frames: Frames
) -> tuple[ClientData, Mapping[str, pd.DataFrame], dict[str, Kind | None], bool]:
    """Return frames as data, by client, the kinds of the columns that are read, and whether they have responses."""
    declared = formula.declared
    labels = declared.parts.labels
    by_name = by_client(frames, declared.clients)
    labeled = all({*labels} <= {*frame.columns} for frame in by_name.values())
    unseen = () if labeled else (*labels, *declared.parts.additions.values())
    kinds = {name: kind for name, kind in declared.rows_of.items() if name not in unseen}
    return formula.data(frames, labeled=labeled), by_name, kinds, labeled


def rows_of_client(formula: Formula, data: ClientData, client: int) -> DesignRows:
    """Return a client's rows, by its position, from the fields that its program reads; what mi() imputes is 0."""
    return _together(formula, [_of_layout(layout, data, client) for layout in formula.layouts])


def step_of_client(formula: Formula, data: ClientData, client: int, name: str) -> DesignRows:
    """Return what a unit of a covariate of mi() adds to the columns of a client's rows that lack it."""
    return _of_layout(formula.layout, data, client, by=f"_by_{NO_NAME.sub('_', name)}")


def has_covariate(data: ClientData, name: str) -> Tensor:
    """Return 1 for each row of some data that has a covariate of mi(), else 0, (n,)."""
    return data.fields[f"has_{NO_NAME.sub('_', name)}"]


def _of_layout(layout: Layout, data: ClientData, client: int, *, by: str = "") -> DesignRows:
    place = slice(int(data.offsets[client]), int(data.offsets[client + 1]))
    count = place.stop - place.start
    fields = {name: value[place] for name, value in data.fields.items()}
    above = {name: value[client] for name, value in data.client_fields.items()}
    ones = torch.full((count, 1), 0.0 if by else 1.0, dtype=torch.float64)

    def of_rows(name: str, width: int) -> Tensor:
        if by and f"{name}{by}" not in fields:
            return torch.zeros(count, width, dtype=torch.float64)
        return fields[f"{name}{by}"].double()

    groups = {
        term.site: ones if term.is_single else of_rows(term.field, len(term.columns))
        for term in layout.groups
        if term.place != "above"
    }
    columns: dict[str, Tensor] = {INTERCEPT: ones[:, 0]}
    for start, names in ((f"x{layout.suffix}", layout.read), ("steps", layout.steps)):
        for j, name in enumerate(names):
            columns[name] = of_rows(start, len(names))[:, j]
    for name, term in layout.own.items():
        columns[name] = groups[term.site][:, term.columns.index(name)]
    codes = {}
    for term in layout.groups:
        if term.place == "above":
            groups[term.site] = _columns_above(term, columns, fields.get(f"{term.field}{by}"))
            codes[term.site] = above[term.index].long().expand(count)
        elif term.place != "clients":
            codes[term.site] = fields[term.index].long()
    common = [columns[name] for name in layout.common.columns]
    offset = fields["offset"].double() if layout.common.offsets else torch.zeros_like(ones[:, 0])
    return DesignRows(
        torch.stack(common, 1) if common else ones[:, :0],
        torch.zeros_like(offset) if by else offset,
        groups,
        codes,
        {n: fields[n].double() for n in OF_ROWS if n in fields},
    )


def _columns_above(
    term: GroupTerm, columns: Mapping[str, Tensor], own_field: Tensor | None
) -> Tensor:
    """Return a term's columns, (n, q), where its own field `left` lacks those that other terms have."""
    values = [
        columns[name] if name in columns or own_field is None else own_field[:, j].double()
        for j, name in enumerate(term.columns)
    ]
    return torch.stack(values, 1)
