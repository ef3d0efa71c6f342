"""Slopes: the derivative of the response by a column of numbers, on a typical row or on average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from hierfl.core.arguments import spelled
from hierfl.core.intervals import PROB
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, shown_as
from hierfl.effects.averages import NewData, Setting
from hierfl.effects.comparisons import respond
from hierfl.effects.conditional_effects import chosen
from hierfl.effects.drawn import Fitted, drawn
from hierfl.effects.intervals import ends, labeled, share_above, tabulated
from hierfl.effects.predictor import Scale, check_scale
from hierfl.effects.predictor_rows import checked

if TYPE_CHECKING:
    from xarray import DataArray

STEP = 1e-4  # to either side, in sds of the column; the error is that of its square


def _shown(found: Slopes) -> Shown:
    return Shown(found.title, found.frame, f"{ends(found.prob)} p is P(slope > 0).")


@shown_as(_shown)
@dataclass(frozen=True, eq=False)
class Slopes:
    """The derivative of the response by one column.

    Args:
        title: of what, by what, and where.
        variable: the column.
        scale: "response" or "link".
        frame: one row per client or group of rows, and level of the response: `client` ("" for the
            average client, "new" for a new one), or the column `by` where rows are averaged by one;
            `level` of a response in categories; `mean`, `sd`, `low` and `high`, the ends of the
            interval, in units of the response over those of the column; and `p`, the posterior
            probability of a slope above 0.
        draws: the draws of each row, an xarray.DataArray of the dimensions `chain`, `draw`,
            `client` or `by`, and `level` of a response in categories.
        prob: of the interval.
    """

    title: str
    variable: str
    scale: Scale
    frame: pd.DataFrame
    draws: DataArray
    prob: float


@one_at_a_time
@spelled
def slopes(
    fit: Fitted,
    variable: str,
    newdata: NewData = "mean",
    *,
    at: Mapping[str, Any] | None = None,
    client: str | Sequence[str] | None = None,
    by: str | None = None,
    scale: Scale = "response",
    prob: float = PROB,
    draws: int = 1000,
    seed: int = 0,
) -> Slopes:
    """Return the derivative of the response by a column, on a typical row or averaged over rows.

    It is a central difference over 1e-4 sds of the column to either side. The names are those of
    marginaleffects.

    Args:
        fit: of a `hierfl.formula`.
        variable: a column of numbers that the formula reads.
        newdata: "mean": a typical row, as in `comparisons`; or frames of fitted clients, over whose
            rows the slope is averaged. Default "mean".
        at: as in `effects`, of a typical row; the column's own value is where the slope is taken.
        client: as in `effects`, of a typical row.
        by: as in `predictions`, of averages over rows.
        scale: "response": slopes of the mean response, or of the probabilities of its levels;
            "link": of the linear predictor.
        prob: of the interval.
        draws: S, of the posterior.
        seed: of the draws.

    Raises:
        TypeError: the fit is of another model.
        KeyError: the formula reads no such column; or a client was not fitted.
        ValueError: the column is a category; another `scale`; or as in `comparisons`.
    """
    check_scale(scale)
    found = drawn(fit, "slopes", draws=draws, seed=seed, prob=prob)
    (column,) = chosen(found.formula, [variable]).values()
    if column.kind == "category":
        raise ValueError(
            f"'{variable}' is a category, which has no slope: take fit.comparisons('{variable}')"
        )
    center, others = column.mean, at
    if at and variable in at and isinstance(newdata, str):  # where the slope is taken
        center = checked(variable, column, at[variable])
        others = {name: value for name, value in at.items() if name != variable}
    step = STEP * column.sd
    start = center - column.mean
    settings = [Setting(variable, step=start + sign * step) for sign in (-1.0, 1.0)]
    responses = respond(
        found, newdata, settings, at=others, client=client, by=by, scale=scale, seed=seed
    )
    slope = (responses.draws[:, :, 1] - responses.draws[:, :, 0]) / (2.0 * step)
    response = found.formula.declared.parts.response
    every = labeled(slope, {**responses.dims, "level": responses.levels}, response)
    return Slopes(
        title=f"slope of {response} by {variable}, {scale} scale{responses.what}",
        variable=variable,
        scale=scale,
        frame=tabulated(every, prob).assign(p=share_above(slope, 0.0)),
        draws=every,
        prob=prob,
    )
