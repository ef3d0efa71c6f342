"""Average predictions: the response of all clients' rows, as they are or with a column set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from hierfl.core.arguments import spelled
from hierfl.core.intervals import PROB
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import shown_as
from hierfl.effects.averages import NewData, Setting, averages
from hierfl.effects.comparisons import several
from hierfl.effects.conditional_effects import chosen, few
from hierfl.effects.drawn import Drawn, drawn
from hierfl.effects.intervals import labeled, tabulated, with_intervals
from hierfl.effects.predictor import Scale, check_scale
from hierfl.posterior.snapshot import Snapshot

if TYPE_CHECKING:
    from xarray import DataArray


@shown_as(with_intervals)
@dataclass(frozen=True, eq=False)
class Predictions:
    """The response, averaged over rows of all clients.

    Args:
        title: what is averaged.
        variable: the column that is set in all rows; None: rows are as they are.
        by: the column by which rows are averaged; None: all together.
        frame: one row per group of rows, value and level of the response: the columns `by` and
            `variable` where there are such, `level` of a response in categories, `mean`, `sd`,
            `low` and `high`, the ends of the interval.
        draws: the draws of each row, an xarray.DataArray of the dimensions `chain`, `draw`, and
            `by`, `variable` and `level` where there are such.
        prob: of the interval.
    """

    title: str
    variable: str | None
    by: str | None
    frame: pd.DataFrame
    draws: DataArray
    prob: float


@one_at_a_time
@spelled
def predictions(
    fit: Snapshot | Drawn,
    variable: str | None = None,
    newdata: NewData = "rows",
    *,
    values: Sequence[Any] | None = None,
    by: str | None = None,
    scale: Scale = "response",
    prob: float = PROB,
    draws: int = 1000,
    seed: int = 0,
) -> Predictions:
    """Return the response averaged over the rows of all clients, as they are or with a column set.

    Each client sets the column to a value in all its rows, keeps their other columns, and takes the
    mean response expected under its own coefficients. It returns the sum of these, a scalar per
    value, group of rows and draw, and the number of its rows. The server adds them up. A binomial
    response is averaged as the share of successes. It is `avg_predictions` of marginaleffects; the
    response at one typical row is `fit.effects`, and that of each row `fit.predict`.

    Args:
        fit: of a `hierfl.formula`, with the clients' rows.
        variable: a column that the formula reads. Default None: rows stay as they are.
        newdata: frames of fitted clients, as `hierfl.fit` takes them. Default "rows": those of the
            fit, which suffice where no term reads another column beside `variable`.
        values: of the column. Default None: all levels; of a number its mean, and one sd below and
            above it.
        by: the column of clients, or any column of the frames of `newdata`: an average for each of
            its values. Default None: one of all rows.
        scale: "response": the mean of the response, or the probabilities of its levels; "link": the
            linear predictor.
        prob: of the interval.
        draws: S, of the posterior.
        seed: of the draws.

    Raises:
        TypeError: the fit is of another model.
        KeyError: the formula reads no such column; or a client of `newdata` was not fitted.
        ValueError: a value is no level; `newdata` is "rows", and a term reads `variable` and another
            column, or `by` is another column than that of clients; or groups within a client of
            `newdata` are not those of the fit.
        RowsNotSaved: `newdata` is "rows", and the rows were not saved with the fit.
    """
    check_scale(scale)
    found = drawn(fit, "predictions", draws=draws, seed=seed, prob=prob)
    settings, dims, what = [Setting()], dict[str, Any](), "rows as they are"
    if variable is None and values is not None:
        raise ValueError("values is given without variable: name the column that they are of")
    if variable is not None:
        (column,) = chosen(found.formula, [variable]).values()
        compared = few(column) if values is None else several(variable, column, values, least=1)
        settings = [Setting(variable, value) for value in compared]
        dims, what = {variable: compared}, f"{variable} set in all rows"
        if by == variable:
            raise ValueError(f"by is '{by}', which is set in all rows: leave out one of the two")
    mean = averages(found, newdata, settings, by, scale)
    if by is not None:
        dims = {by: mean.groups, **dims}
    response = found.formula.declared.parts.response
    every = labeled(mean.draws, {**dims, "level": mean.levels}, response)
    return Predictions(
        title=f"{response}, averaged over clients' rows{f' by {by}' if by else ''}, {what}",
        variable=variable,
        by=by,
        frame=tabulated(every, prob),
        draws=every,
        prob=prob,
    )
