"""Conditional effects: the response along one column, the others held fixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from hierfl.core.arguments import shown, spelled
from hierfl.core.intervals import PROB
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import shown_as
from hierfl.effects.drawn import Fitted, drawn
from hierfl.effects.intervals import STATISTICS, labeled, tabulated, with_intervals
from hierfl.effects.predictor import Scale, asked, check_scale, on_scale
from hierfl.effects.predictor_rows import predictors, typical
from hierfl.formulas.columns import Column
from hierfl.formulas.formula import Formula
from hierfl.formulas.terms import calls

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import DataArray

POINTS = 41  # of a grid over a number
REACH = 2.0  # of that grid, in sds from the mean on either side
# Names in every answer.
TAKEN = ("client", "level", "chain", "draw", *STATISTICS)


@shown_as(with_intervals)
@dataclass(frozen=True, eq=False)
class Effects:
    """The response along one column, the others held fixed.

    Args:
        title: what is shown, and where the other columns are.
        variable: the column.
        by: a second one; None: there is none.
        scale: "response" or "link".
        response: the response's name.
        frame: one row per value, client and level of the response: the column `variable`, `by`
            where there is one, `client` ("" for the average client, "new" for a new one), `level`
            of a response in categories, `mean`, `sd`, and `low` and `high`, the ends of the interval.
        draws: the draws of each row, an xarray.DataArray of the dimensions `chain`, `draw`,
            `client`, `by` where there is one, `variable`, and `level` of a response in categories.
        prob: of the interval.
    """

    title: str
    variable: str
    by: str | None
    scale: Scale
    response: str
    frame: pd.DataFrame
    draws: DataArray
    prob: float

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the effects: lines with bands along a number, points with intervals at levels.

        Args:
            ax: axes to draw on. Default None: new ones.
        """
        from hierfl.plots.effects import conditional_effect, new_axes

        label = (
            self.response if self.scale == "response" else f"linear predictor of {self.response}"
        )
        return conditional_effect(new_axes(ax), self.frame, self.variable, by=self.by, label=label)


@one_at_a_time
@spelled
def effects(
    fit: Fitted,
    variable: str,
    *,
    by: str | None = None,
    at: Mapping[str, Any] | None = None,
    client: str | Sequence[str] | None = None,
    grid: Sequence[Any] | None = None,
    scale: Scale = "response",
    prob: float = PROB,
    draws: int = 1000,
    seed: int = 0,
) -> Effects:
    """Return the response along one column, the other columns held at typical values.

    No rows are read: typical values are those of the schema, numbers at their means and categories
    at their first levels. A binomial response is shown as the probability of one trial.

    Args:
        fit: of a `hierfl.formula`.
        variable: a column that the formula reads.
        by: a second one: its levels; of a number its mean, and one sd below and above it. Default
            None.
        at: column -> value, in place of the typical one; group above the clients or at several of
            them -> its name. Deviations of other groups are zero; a new client's groups are new
            too. Default none.
        client: a name, or a list of names: with the client's own coefficients. "new": one new
            client per draw, its coefficients drawn from the group-level distribution, so that the
            band includes the spread between clients. "each": every client, and a new one. Default
            None: the average client, whose deviations are zero.
        grid: values of `variable`. Default None: all levels, or 41 numbers from the mean minus two
            sds to the mean plus two, within the ends of a spline.
        scale: "response": the mean of the response, or the probabilities of its levels; "link": the
            linear predictor.
        prob: of the interval.
        draws: S, of the posterior.
        seed: of the draws.

    Raises:
        TypeError: the fit is of another model.
        KeyError: the formula reads no such column; or a client was not fitted.
        ValueError: a value is no level; or `scale` is another word.
    """
    check_scale(scale)
    found = drawn(fit, "effects", draws=draws, seed=seed, prob=prob)
    formula = found.formula
    columns = chosen(formula, [variable] if by is None else [variable, by], at)
    values = along(formula, variable, columns[variable]) if grid is None else listed(grid, "grid")
    if not values:
        raise ValueError("grid is empty: give one value or more")
    asked_for, dims = crossed({variable: values} | ({} if by is None else {by: few(columns[by])}))
    rows = typical(formula, at, asked_for)
    names, parts = [], []
    levels: tuple[str, ...] = ("",)
    for name, who in asked(found, client):
        at_draws, levels = on_scale(found, rows, who, scale, seed=seed)
        names.append(name)
        parts.append(at_draws)
    response = formula.declared.parts.response
    every = labeled(torch.stack(parts, 1), {"client": names, **dims, "level": levels}, response)
    return Effects(
        title=f"{response} along {variable}{fixed(formula, asked_for, at)}",
        variable=variable,
        by=by,
        scale=scale,
        response=response,
        frame=tabulated(every, prob, first=[*asked_for]),
        draws=every,
        prob=prob,
    )


def listed(values: Any, argument: str) -> list[Any]:
    """Return values as a list; refuse a single one."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{argument} is {values!r}: give a list of values, [{values!r}]")
    return list(values)


def crossed(grid: Mapping[str, Sequence[Any]]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return a variable's values, repeated for each value of a second one, and the dimensions, the second one first."""
    (variable, values), *others = grid.items()
    if not others:
        return {variable: list(values)}, {variable: list(values)}
    ((by, second),) = others
    both = {variable: list(values) * len(second), by: [v for v in second for _ in values]}
    return both, {by: list(second), variable: list(values)}


def chosen(
    formula: Formula, names: Sequence[str], at: Mapping[str, Any] | None = None
) -> dict[str, Column]:
    """Return what was agreed about the columns that a user asks for, or refuse them."""
    known = predictors(formula)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a column is {shown(name)}: give the name of one, such as 'age'")
        if name in TAKEN and name in known:
            raise ValueError(
                f"'{name}' is the name of a column or a dimension of the answer: rename the column"
            )
        if name not in known:
            raise KeyError(
                f"'{name}' is no column that the formula's terms read: they read "
                f"{', '.join(known) or 'none'}"
            )
        if name in (at or {}):
            raise ValueError(f"at holds '{name}' fixed, which is to vary: leave it out of at")
    if len(set(names)) < len(names):
        raise ValueError(f"by is '{names[0]}', the column itself: give another one")
    return {name: known[name] for name in names}


def along(formula: Formula, name: str, column: Column) -> list[Any]:
    """Return the values of a grid over a column, within the ends of its splines."""
    if column.kind == "category":
        return list(column.levels)
    low, high = column.mean - REACH * column.sd, column.mean + REACH * column.sd
    for found in formula.declared.described:
        for call in calls(found):
            constants = formula.agreed.transforms.get(str(call))
            knots = constants.knots if constants else ()
            if knots and getattr(call.args[0], "name", None) == name:
                low, high = max(low, knots[0]), min(high, knots[-1])
    grid: list[Any] = np.linspace(low, high, POINTS).tolist()
    return grid


def few(column: Column) -> list[Any]:
    """Return the levels of a column, or the mean of a number and one sd below and above it."""
    if column.kind == "category":
        return list(column.levels)
    return [column.mean - column.sd, column.mean, column.mean + column.sd]


def fixed(
    formula: Formula, varied: Mapping[str, Sequence[Any]], at: Mapping[str, Any] | None
) -> str:
    """Return the values of the other columns, in words."""
    held = {
        name: column.levels[0] if column.kind == "category" else f"{column.mean:.4g}"
        for name, column in predictors(formula).items()
        if name not in varied
    }
    both = {**held, **(at or {})}
    return f", at {', '.join(f'{name} {value}' for name, value in both.items())}" if both else ""
