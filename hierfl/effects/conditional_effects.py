"""The response along one column, and survival curves of times, with the other columns held fixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from hierfl.core.arguments import NoSuchName, expect, expect_kind, spelled
from hierfl.core.process import one_at_a_time
from hierfl.effects.drawn import EACH, CoefficientDraws, Drawing, Fitted, drawn
from hierfl.effects.estimates import STATISTICS, Estimates, labeled
from hierfl.effects.predictor import (
    SCALES,
    Scale,
    asked,
    distribution,
    on_scale,
    parameters_at,
    predictor,
)
from hierfl.effects.predictor_rows import predictors, typical
from hierfl.formulas.columns import Column
from hierfl.formulas.expressions import Name, calls
from hierfl.formulas.formula import Formula
from hierfl.models.families.survival import hazards

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS, TIMES = 41, 50  # of a grid over a number; of the times of a curve
REACH = 2.0  # of that grid, in sds from the mean on either side
# Names in every answer.
TAKEN = ("client", "level", "chain", "draw", *STATISTICS)


@dataclass(frozen=True, eq=False, repr=False)
class ConditionalEffects(Estimates):
    """The response along one column, the others held fixed.

    Args:
        variable: the column.
        by: a second one; None: there is none.
        label: of the response, on an axis.
    """

    variable: str = ""
    by: str | None = None
    label: str = ""

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the effects: lines with bands along a number, points with intervals at levels.

        Args:
            ax: axes to draw on. Default None: new ones. With `by` and several clients, a panel for
                each client; the axes of the first are returned.
        """
        from hierfl.plots.effects import PANELS, client_panels, conditional_effect, new_axes

        if ax is None and self.by and 1 < self.frame["client"].nunique() <= PANELS:
            return client_panels(self.frame, self.variable, self.by, self.label)
        axes = new_axes(ax)
        return conditional_effect(axes, self.frame, self.variable, by=self.by, label=self.label)


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
    **drawing: Unpack[Drawing],
) -> ConditionalEffects:
    """Return the response along one column, with the other columns at typical values.

    No rows are read: typical values are those of the schema, numbers at their means and categories
    at their first levels. A binomial response is shown as the probability of one trial.

    Args:
        fit: of a `hierfl.formula`.
        variable: a column that the formula reads.
        by: a second column, at its levels, or for a number at its mean and one sd below and above
            it. Default None.
        at: column -> value, in place of the typical one; a group above the clients, or one that
            several have -> its name. Deviations of other groups are zero; a new client's groups are
            new too. Default: none.
        client: a client's name, or a list of names: their own coefficients. "new": one new client
            per draw, with coefficients from the group-level distribution, so the band includes the
            spread between clients. "each": every client, and a new one. Default None: the average
            client, whose deviations are zero.
        grid: values of `variable`. Default None: all levels, or 41 numbers from the mean minus two
            sds to the mean plus two, within the ends of a spline.
        scale: "response": the mean of the response, or the probabilities of its levels; "link": the
            linear predictor.
        **drawing: `prob`, `draws` and `seed`.

    Returns:
        One row per value, client and level of the response: the columns `variable`, `by` if there
        is one, and `client` ("" for the average client, "new" for a new one).

    Raises:
        TypeError: the fit is of another model.
        KeyError: the formula reads no such column; or a client was not fitted.
        ValueError: a value is not a level; or `scale` is neither.
    """
    expect(scale=(scale, SCALES))
    draws = drawn(fit, "effects", client=client, **drawing)
    formula = draws.formula
    columns = chosen(formula, [variable] if by is None else [variable, by], at)
    values = along(formula, variable, columns[variable]) if grid is None else listed(grid, "grid")
    if not values:
        raise ValueError("grid is empty: give one value or more")
    asked_for, dims = crossed({variable: values} | ({} if by is None else {by: few(columns[by])}))
    rows = typical(formula, at, asked_for)
    by_client = {name: on_scale(draws, rows, who, scale) for name, who in asked(draws, client)}
    curves, levels = zip(*by_client.values(), strict=True)
    response = formula.declared.parts.response
    label = response if scale == "response" else f"linear predictor of {response}"
    return ConditionalEffects.of(
        f"{response} along {variable}{fixed(formula, asked_for, at)}",
        labeled(
            torch.stack(curves, 1), {"client": [*by_client], **dims, "level": levels[0]}, response
        ),
        draws,
        first=[*asked_for],
        variable=variable,
        by=by,
        label=label,
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
    varied = {variable: list(values) * len(second), by: [v for v in second for _ in values]}
    return varied, {by: list(second), variable: list(values)}


def chosen(
    formula: Formula, names: Sequence[str], at: Mapping[str, Any] | None = None
) -> dict[str, Column]:
    """Return what was agreed about the columns that a user asks for, or refuse them."""
    columns = predictors(formula)
    for name in names:
        expect_kind(name, str, "a column", "give the name of one, such as 'age'")
        if name not in columns:
            there = ", ".join(columns) or "none"
            raise NoSuchName(f"'{name}' is not a column that the formula's terms read: {there}")
        reason = None
        if name in TAKEN:
            reason = "is the name of a column or a dimension of the answer: rename the column"
        elif name in (at or {}):
            reason = "is to vary, and at holds it fixed: leave it out of at"
        elif names.count(name) > 1:
            reason = "is the column itself, and by too: give another by"
        if reason is not None:
            raise ValueError(f"'{name}' {reason}")
    return {name: columns[name] for name in names}


def along(formula: Formula, name: str, column: Column) -> list[Any]:
    """Return the values of a grid over a column, within the ends of its splines."""
    if column.kind == "category":
        return list(column.levels)
    low, high = column.mean - REACH * column.sd, column.mean + REACH * column.sd
    for terms in formula.declared.described:
        for call in calls(terms):
            constants = formula.agreed.transforms.get(str(call))
            knots = constants.knots if constants else ()
            if knots and call.args[0] == Name(name):
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
    held = {**held, **(at or {})}
    return f", at {', '.join(f'{name} {value}' for name, value in held.items())}" if held else ""


# ------------------------------------------------------------ survival curves
@dataclass(frozen=True, eq=False, repr=False)
class Survival(Estimates):
    """The probability that a time is beyond t.

    Args:
        response: the column of the times.
        by: the column of which each value has a curve of its own; None: there is none.
    """

    response: str = ""
    by: str | None = None

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the curves with bands.

        Args:
            ax: axes to draw on. Default None: new ones.
        """
        from hierfl.plots.effects import conditional_effect, new_axes

        axes = conditional_effect(
            new_axes(ax), self.frame, "time", by=self.by, label="share beyond"
        )
        axes.set(xlabel=self.response, ylim=(0.0, 1.02))
        return axes


@one_at_a_time
@spelled
def survival(
    fit: Fitted,
    *,
    by: str | None = None,
    at: Mapping[str, Any] | None = None,
    times: Sequence[float] | None = None,
    client: str | Sequence[str] | None = EACH,
    **drawing: Unpack[Drawing],
) -> Survival:
    """Return survival curves of a row at typical values, from time 0 on.

        S(t) = P(T > t) = exp(-H(t)),    H the cumulative hazard

    No rows are read. A new client's mean curve is that of a person at an unknown client.

    Args:
        fit: of a `hierfl.formula` for times: exponential, weibull, lognormal or
            piecewise_exponential.
        by: a column that the formula reads: a curve for each level of a category, or for a number's
            mean and one sd below and above it. Default None.
        at: column -> value, as in `fit.effects`.
        times: 0 or later, in the unit of the response. Default None: 50 times up to twice the mean
            of the response, censored times included.
        client: as in `effects`. Default "each": every client, and a new one.
        **drawing: `prob`, `draws` and `seed`.

    Returns:
        One row per client, value of `by` and time: `client` ("" for the average client, "new" for a
        new one), the column `by` where there is one, and `time`.

    Raises:
        TypeError: the fit is of another model.
        KeyError: the formula reads no such column; or a client was not fitted.
        ValueError: the response is not a time; or a time is below 0 or not finite.
    """
    draws = drawn(fit, "survival", client=client, **drawing)
    if draws.family.kind != "time":
        raise ValueError(f"the response is {draws.family.name}, not a time: fit a family of times")
    when = _checked(draws, times)
    levels = {} if by is None else {by: few(chosen(draws.formula, [by], at)[by])}
    rows = typical(draws.formula, at, levels)
    by_client = {}
    for name, who in asked(draws, client):
        eta = predictor(draws, rows, who)[..., None].expand(-1, -1, len(when))
        flat = eta.reshape(draws.count, -1)
        every = when.repeat(rows.count).expand_as(flat)
        values = {}
        for parameter, value in parameters_at(draws, rows, who).items():
            of_rows = parameter in draws.with_terms and value.shape[1] > 1
            values[parameter] = value.repeat_interleave(len(when), 1) if of_rows else value
        hazard: Tensor = hazards(distribution(draws, flat, values)).cumulative_hazard(every)
        by_client[name] = torch.exp(-hazard).reshape(eta.shape)
    response = draws.formula.declared.parts.response
    dims = {"client": [*by_client], **levels, "time": when.tolist()}
    return Survival.of(
        f"{response}: share beyond{fixed(draws.formula, levels, at)}",
        labeled(torch.stack([*by_client.values()], 1), dims, response),
        draws,
        response=response,
        by=by,
    )


def _checked(draws: CoefficientDraws, times: Sequence[float] | None) -> Tensor:
    """Return the times, float64; refuse one below 0 or not finite, and none at all."""
    if times is None:
        return torch.linspace(0.0, 2.0 * draws.response.mean, TIMES, dtype=torch.float64)
    values = np.asarray(times, dtype=np.float64).reshape(-1)
    if not len(values) or not (np.isfinite(values) & (values >= 0.0)).all():
        what = f"times are {list(times)}"
        raise ValueError(f"{what}: give one or more that are finite and 0 or later")
    return torch.as_tensor(values)
