"""Comparisons: how much the response differs between values of one column, on a typical row or on average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch
from torch import Tensor

from hierfl.core.arguments import spelled
from hierfl.core.intervals import PROB
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, shown_as
from hierfl.effects.averages import NewData, Setting, averages
from hierfl.effects.conditional_effects import chosen, listed
from hierfl.effects.drawn import Drawn, Fitted, drawn
from hierfl.effects.intervals import ends, labeled, share_above, tabulated
from hierfl.effects.predictor import Scale, asked, check_scale, on_scale
from hierfl.effects.predictor_rows import checked, typical
from hierfl.formulas.columns import Column

if TYPE_CHECKING:
    from xarray import DataArray

Comparison = Literal["difference", "ratio"]
LOGARITHMS = ("log", "logit", "cloglog")  # links whose differences are logarithms of ratios


def _shown(found: Comparisons) -> Shown:
    edge = "0" if found.comparison == "difference" else "1"
    note = f"{ends(found.prob)} p is P({found.comparison} > {edge})."
    return Shown(found.title, found.frame, note)


@shown_as(_shown)
@dataclass(frozen=True, eq=False)
class Comparisons:
    """How much the response differs between values of one column.

    Args:
        title: what is compared.
        variable: the column.
        comparison: "difference" or "ratio".
        scale: "response" or "link".
        frame: one row per pair of values, client or group of rows, and level of the response:
            `comparison`, such as "m - f"; `client` ("" for the average client, "new" for a new
            one), or the column `by` where rows are averaged by one; `level` of a response in
            categories; `mean`, `sd`, `low` and `high`, the ends of the interval; and `p`, the
            posterior probability of a difference above 0, or a ratio above 1.
        draws: the draws of each row, an xarray.DataArray of the dimensions `chain`, `draw`,
            `client` or `by`, `comparison`, and `level` of a response in categories.
        prob: of the interval.
    """

    title: str
    variable: str
    comparison: Comparison
    scale: Scale
    frame: pd.DataFrame
    draws: DataArray
    prob: float


@one_at_a_time
@spelled
def comparisons(
    fit: Fitted,
    variable: str,
    newdata: NewData = "mean",
    *,
    values: Sequence[Any] | float | None = None,
    comparison: Comparison = "difference",
    at: Mapping[str, Any] | None = None,
    client: str | Sequence[str] | None = None,
    by: str | None = None,
    scale: Scale = "response",
    prob: float = PROB,
    draws: int = 1000,
    seed: int = 0,
) -> Comparisons:
    """Compare the response between values of one column, on a typical row or averaged over rows.

    The names are those of marginaleffects. On a typical row, as in `fit.effects`, no rows are read.
    Averaged over rows, each client compares its own rows, as in `fit.predictions`; a ratio is that
    of the two averages.

    Args:
        fit: of a `hierfl.formula`.
        variable: a column that the formula reads.
        newdata: "mean": a typical row, numbers at their means and categories at their first levels;
            "rows": the average over the rows of the fit; or frames of fitted clients, over whose
            rows the comparison is averaged. Default "mean".
        values: every two of them are compared, the later with the earlier. A number, such as
            10, compares each row's own value plus half of it with that minus half of it, and
            needs frames or a typical row. Default
            None: all levels; of a number its mean, and one sd above it.
        comparison: "difference", or "ratio". On the link scale a ratio is the exponential of the
            difference: the odds ratio of a logit link, the ratio of rates, times or hazards of a
            log link.
        at: as in `effects`, of a typical row.
        client: as in `effects`, of a typical row.
        by: as in `predictions`, of averages over rows.
        scale: "response": means of the response, or probabilities of its levels; "link": linear
            predictors.
        prob: of the interval.
        draws: S, of the posterior.
        seed: of the draws.

    Raises:
        TypeError: the fit is of another model.
        KeyError: the formula reads no such column; or a client was not fitted.
        ValueError: fewer than two values, or a value is no level; another `comparison` or `scale`; a
            ratio of what may be negative; `by` for a typical row, or `at` or `client` for averages;
            or as in `predictions`.
        RowsNotSaved: `newdata` is "rows", and the rows were not saved with the fit.
    """
    check_scale(scale)
    found = drawn(fit, "comparisons", draws=draws, seed=seed, prob=prob)
    check_comparison(found, comparison, scale)
    (column,) = chosen(found.formula, [variable], at).values()
    settings, names = _settings(variable, column, values)
    responses = respond(
        found, newdata, settings, at=at, client=client, by=by, scale=scale, seed=seed
    )
    pairs, sign = (
        [*combinations(range(len(settings)), 2)],
        "-" if comparison == "difference" else "/",
    )
    both = (
        responses.draws[:, :, [j for _, j in pairs]],
        responses.draws[:, :, [i for i, _ in pairs]],
    )
    at_draws = _compared(*both, comparison, scale)
    labels = [
        names if isinstance(names, str) else f"{names[j]} {sign} {names[i]}" for i, j in pairs
    ]
    dims = {**responses.dims, "comparison": labels, "level": responses.levels}
    response = found.formula.declared.parts.response
    every = labeled(at_draws, dims, response)
    edge = 0.0 if comparison == "difference" else 1.0
    frame = tabulated(every, prob, first=["comparison"]).assign(p=share_above(at_draws, edge))
    words = "differences" if comparison == "difference" else "ratios"
    return Comparisons(
        title=f"{words} of {response} between values of {variable}, {scale} scale{responses.what}",
        variable=variable,
        comparison=comparison,
        scale=scale,
        frame=frame,
        draws=every,
        prob=prob,
    )


@dataclass(frozen=True, eq=False)
class Responses:
    """Responses, (S, clients or groups, settings, levels), their first dimension by name, and what they are of."""

    draws: Tensor
    dims: Mapping[str, Sequence[str]]
    levels: tuple[str, ...]
    what: str


def respond(
    found: Drawn,
    newdata: NewData,
    settings: Sequence[Setting],
    *,
    at: Mapping[str, Any] | None,
    client: Any,
    by: str | None,
    scale: Scale,
    seed: int,
) -> Responses:
    """Return the response under each setting, on a typical row of some clients or averaged over rows."""
    if not isinstance(newdata, str) or newdata != "mean":
        if at or client is not None:
            raise ValueError(
                "at and client are of a typical row, newdata='mean': averages over rows take by="
            )
        mean = averages(found, newdata, settings, by, scale)
        where = f", averaged over clients' rows{f' by {by}' if by else ''}"
        return Responses(mean.draws, {by: mean.groups} if by else {}, mean.levels, where)
    if by is not None:
        raise ValueError(
            f"by is '{by}', and newdata is 'mean', a typical row: average over rows, "
            "newdata='rows', or frames"
        )
    rows = typical(found.formula, at, _grid(found, settings, at))
    parts: dict[str, Tensor] = {}
    levels: tuple[str, ...] = ("",)
    for name, who in asked(found, client):
        parts[name], levels = on_scale(found, rows, who, scale, seed=seed)
    return Responses(torch.stack([*parts.values()], 1), {"client": [*parts]}, levels, "")


def _grid(
    found: Drawn, settings: Sequence[Setting], at: Mapping[str, Any] | None
) -> dict[str, list[Any]]:
    """Return the values of a typical row's column under each setting, steps from its mean."""
    variable = str(settings[0].variable)
    (column,) = chosen(found.formula, [variable], at).values()
    each = [s.value if s.step is None else column.mean + s.step for s in settings]
    return {variable: each}


def _settings(variable: str, column: Column, values: Any) -> tuple[list[Setting], str | list[str]]:
    """Return the settings to compare, and the name of each value, or of the only comparison."""
    if isinstance(values, Real) and not isinstance(values, bool):
        step = float(values)
        if column.kind == "category" or not abs(step) < float("inf") or step == 0.0:
            raise ValueError(
                f"values is {values!r}: a step is a finite number other than 0, of a column of "
                "numbers; of others give a list of levels"
            )
        return [Setting(variable, step=-step / 2), Setting(variable, step=step / 2)], f"{step:+.4g}"
    compared = several(variable, column, values)
    names = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in compared]
    return [Setting(variable, value) for value in compared], names


def several(
    name: str, column: Column, values: Sequence[Any] | None, *, least: int = 2
) -> list[Any]:
    """Return the values to compare; refuse fewer than `least` different ones."""
    if values is None:
        if column.kind == "category":
            return list(column.levels)
        return [column.mean, column.mean + column.sd]
    found = [checked(name, column, value) for value in listed(values, "values")]
    if len(found) < least or len(set(found)) < len(found):
        number = {1: "one", 2: "two"}[least]
        raise ValueError(f"values are {found}: give {number} or more different ones")
    return found


def check_comparison(found: Drawn, comparison: object, scale: Scale) -> None:
    """Refuse a comparison that is neither of the two words, and ratios of what may be negative."""
    if comparison not in ("difference", "ratio"):
        raise ValueError(f"comparison is {comparison!r}: it must be 'difference' or 'ratio'")
    if comparison == "difference":
        return
    family = found.family
    if scale == "link" and family.link not in LOGARITHMS and family.name != "lognormal":
        raise ValueError(
            f"comparison is 'ratio', and the link of {family.name} is '{family.link}', no "
            "logarithm: take comparison='difference', or scale='response'"
        )
    if scale == "response" and family.kind == "real" and family.link != "log":
        raise ValueError(
            f"comparison is 'ratio', and responses of {family.name} may be negative: take "
            "comparison='difference'"
        )


def _compared(after: Tensor, before: Tensor, comparison: Comparison, scale: Scale) -> Tensor:
    if comparison == "difference":
        return after - before
    return torch.exp(after - before) if scale == "link" else after / before
