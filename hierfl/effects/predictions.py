"""Average predictions: the response of all clients' rows, as they are or with a column set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from hierfl.core.arguments import expect, spelled
from hierfl.core.process import one_at_a_time
from hierfl.effects.answer import Answer, labeled
from hierfl.effects.averages import Intervention, NewData, averages
from hierfl.effects.comparisons import several
from hierfl.effects.conditional_effects import chosen, few
from hierfl.effects.drawn import CoefficientDraws, Drawing, drawn
from hierfl.effects.predictor import SCALES, Scale
from hierfl.posterior.snapshot import Snapshot


@one_at_a_time
@spelled
def predictions(
    fit: Snapshot | CoefficientDraws,
    variable: str | None = None,
    newdata: NewData = "rows",
    *,
    values: Sequence[Any] | None = None,
    by: str | None = None,
    scale: Scale = "response",
    **drawing: Unpack[Drawing],
) -> Answer:
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
        **drawing: `prob`, `draws` and `seed`.

    Returns:
        One row per group of rows, value and level of the response: the columns `by` and `variable`
        where there are such.

    Raises:
        TypeError: the fit is of another model.
        KeyError: the formula reads no such column; or a client of `newdata` was not fitted.
        ValueError: a value is no level; `newdata` is "rows", and a term reads `variable` and another
            column, or `by` is another column than that of clients; or groups within a client of
            `newdata` are not those of the fit.
        RowsNotSaved: `newdata` is "rows", and the rows were not saved with the fit.
    """
    expect(scale=(scale, SCALES))
    draws = drawn(fit, "predictions", **drawing)
    settings, dims, what = [Intervention()], dict[str, Any](), "rows as they are"
    if variable is None and values is not None:
        raise ValueError("values is given without variable: name the column that they are of")
    if variable is not None:
        (column,) = chosen(draws.formula, [variable]).values()
        grid = few(column) if values is None else several(variable, column, values, least=1)
        settings = [Intervention(variable, value) for value in grid]
        dims, what = {variable: grid}, f"{variable} set in all rows"
        if by == variable:
            raise ValueError(f"by is '{by}', which is set in all rows: leave out one of the two")
    mean = averages(draws, newdata, settings, by, scale)
    response = draws.formula.declared.parts.response
    return Answer.of(
        f"{response}, averaged over clients' rows{f' by {by}' if by else ''}, {what}",
        labeled(mean.draws, {**mean.dims, **dims, "level": mean.levels}, response),
        draws,
    )
