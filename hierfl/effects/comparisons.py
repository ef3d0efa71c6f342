"""Average predictions, and comparisons: how the response differs between values of a column, or changes along it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from numbers import Real
from typing import Any, Literal, NamedTuple, Unpack

import torch

from hierfl.core.arguments import expect, spelled
from hierfl.core.process import one_at_a_time
from hierfl.effects.averages import Intervention, NewData, Responses, averages
from hierfl.effects.conditional_effects import chosen, few, listed
from hierfl.effects.drawn import CoefficientDraws, Drawing, Fitted, drawn
from hierfl.effects.estimates import Estimates, labeled, share_above
from hierfl.effects.predictor import SCALES, Scale, asked, on_scale
from hierfl.effects.predictor_rows import checked, typical
from hierfl.formulas.columns import Column
from hierfl.posterior.snapshot import Snapshot

Comparison = Literal["difference", "ratio", "slope"]
EDGE = {"difference": 0.0, "ratio": 1.0, "slope": 0.0}  # above which `p` is the probability
LOGARITHMS = ("log", "logit", "cloglog")  # links whose differences are logarithms of ratios
STEP = 1e-4  # of a slope, to either side, in sds of the column; the error is that of its square


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
    **drawing: Unpack[Drawing],
) -> Estimates:
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
        values: every two of them are compared, the later with the earlier. A single number, such as
            10, compares each row's value plus half of it with that value minus half of it, and
            needs frames or a typical row. Default None: all levels; for a number, its mean and one
            sd above it.
        comparison: "difference"; "ratio" (on the link scale, the exponential of the difference: an
            odds ratio for a logit link, a ratio of rates, times or hazards for a log link); or
            "slope", the derivative with respect to a column of numbers, by a central difference of
            1e-4 sds of the column to either side.
        at: as in `effects`, for a typical row. A slope is taken at the column's own value.
        client: as in `effects`, for a typical row.
        by: as in `predictions`, for averages over rows.
        scale: "response": means of the response, or probabilities of its levels; "link": linear
            predictors.
        **drawing: `prob`, `draws` and `seed`.

    Returns:
        One row per pair of values, client or group of rows, and level of the response:
        `comparison`, such as "m - f" or "slope"; `client` ("" for the average client, "new" for a
        new one), or the column `by`; and `p`, the posterior probability that a difference or slope
        is above 0, or a ratio above 1.

    Raises:
        TypeError: the fit is of another model.
        KeyError: the formula reads no such column; or a client was not fitted.
        ValueError: there are fewer than two values, or one is not a level; `comparison` or `scale`
            is unknown; a ratio of numbers that may be negative; a slope of a category, or with
            `values`; `by` for a typical row, or `at` or `client` for averages; or as in
            `predictions`.
        RowsNotSaved: `newdata` is "rows", and the rows were not saved with the fit.
    """
    expect(scale=(scale, SCALES), comparison=(comparison, tuple(EDGE)))
    draws = drawn(fit, "comparisons", client=client, **drawing)
    of_row = at if is_typical(newdata) else None
    contrast = _contrast(draws, variable, values, comparison, of_row)
    if comparison == "slope" and is_typical(newdata) and at:
        at = {name: value for name, value in at.items() if name != variable}
    if comparison == "ratio":
        _check_ratio(draws, scale)
    responses = respond(draws, newdata, contrast.settings, at=at, client=client, by=by, scale=scale)
    before, after = (
        responses.draws[:, :, list(side)] for side in zip(*contrast.pairs, strict=True)
    )
    compared = (after - before) / contrast.width
    if comparison == "ratio":
        compared = torch.exp(after - before) if scale == "link" else after / before
    where = f", averaged over clients' rows{f' by {by}' if by else ''}"
    response = draws.formula.declared.parts.response
    dims = {**responses.dims, "comparison": contrast.labels, "level": responses.levels}
    return Estimates.of(
        f"{comparison}s of {response} by {variable}, {scale} scale{'' if is_typical(newdata) else where}",
        labeled(compared, dims, response),
        draws,
        first=["comparison"],
        p=share_above(compared, EDGE[comparison]),
        note=f"p is P({comparison} > {EDGE[comparison]:.0f}).",
    )


class Contrast(NamedTuple):
    """Settings of a column, the pairs (before, after) of them, a label each, and what differences are over."""

    settings: list[Intervention]
    pairs: list[tuple[int, int]]
    labels: list[str]
    width: float = 1.0


def is_typical(newdata: NewData) -> bool:
    """Return whether the response is that of a typical row."""
    return isinstance(newdata, str) and newdata == "mean"


def _contrast(
    draws: CoefficientDraws,
    variable: str,
    values: Any,
    comparison: str,
    at: Mapping[str, Any] | None,
) -> Contrast:
    """Return every two values of a column, or a step of it; or one to either side of where a slope is taken."""
    is_slope = comparison == "slope"
    (column,) = chosen(draws.formula, [variable], None if is_slope else at).values()
    if is_slope:
        if values is not None:
            fix = "at= says where a slope is taken"
            raise ValueError(f"values= is for differences and ratios: {fix}")
        if column.kind == "category":
            raise ValueError(f"'{variable}' is a category, which has no slope: compare its levels")
        center = checked(variable, column, at[variable]) if at and variable in at else column.mean
        step, start = STEP * column.sd, center - column.mean
        settings = [Intervention(variable, step=start + side) for side in (-step, step)]
        return Contrast(settings, [(0, 1)], ["slope"], 2.0 * step)
    if isinstance(values, Real) and not isinstance(values, bool):
        step = float(values)
        if column.kind == "category" or not abs(step) < float("inf") or step == 0.0:
            what = "a step is a finite number other than 0, of a column of numbers"
            raise ValueError(f"values is {values!r}: {what}")
        settings = [Intervention(variable, step=side) for side in (-step / 2, step / 2)]
        return Contrast(settings, [(0, 1)], [f"{step:+.4g}"])
    compared = several(variable, column, values)
    names = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in compared]
    pairs = [*combinations(range(len(compared)), 2)]
    sign = "-" if comparison == "difference" else "/"
    labels = [f"{names[after]} {sign} {names[before]}" for before, after in pairs]
    return Contrast([Intervention(variable, value) for value in compared], pairs, labels)


def respond(
    draws: CoefficientDraws,
    newdata: NewData,
    settings: Sequence[Intervention],
    *,
    at: Mapping[str, Any] | None,
    client: Any,
    by: str | None,
    scale: Scale,
) -> Responses:
    """Return the response under each setting, on a typical row of some clients or averaged over rows."""
    if by is not None if is_typical(newdata) else at or client is not None:
        what = "at and client are for a typical row, and by is for averages over rows or frames"
        raise ValueError(f"{what}: leave out those of one kind")
    if not is_typical(newdata):
        return averages(draws, newdata, settings, by, scale)
    variable = str(settings[0].variable)
    (column,) = chosen(draws.formula, [variable], at).values()
    grid = [s.value if s.step is None else column.mean + s.step for s in settings]
    rows = typical(draws.formula, at, {variable: grid})
    by_client = {name: on_scale(draws, rows, who, scale) for name, who in asked(draws, client)}
    of_clients, levels = zip(*by_client.values(), strict=True)
    return Responses(torch.stack(of_clients, 1), {"client": [*by_client]}, levels[0])


def several(
    name: str, column: Column, values: Sequence[Any] | None, *, least: int = 2
) -> list[Any]:
    """Return the values to compare; refuse fewer than `least` different ones."""
    if values is None:
        if column.kind == "category":
            return list(column.levels)
        return [column.mean, column.mean + column.sd]
    compared = [checked(name, column, value) for value in listed(values, "values")]
    if len(compared) < least or len(set(compared)) < len(compared):
        raise ValueError(f"values are {compared}: give {least} or more different ones")
    return compared


def _check_ratio(draws: CoefficientDraws, scale: Scale) -> None:
    """Refuse ratios of what may be negative."""
    family, reason = draws.family, ""
    if scale == "link" and family.link not in LOGARITHMS and family.name != "lognormal":
        reason = f"the link of {family.name} is '{family.link}', not a logarithm"
    elif scale == "response" and family.kind == "real" and family.link != "log":
        reason = f"responses of {family.name} may be negative"
    if reason:
        fix = "use comparison='difference', or the other scale"
        raise ValueError(f"comparison is 'ratio', and {reason}: {fix}")


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
) -> Estimates:
    """Return the response averaged over all clients' rows, as they are or with one column set.

    Each client sets the column to a value in all its rows, keeps their other columns, and computes
    each row's mean response under its own coefficients. It returns the sum, a scalar per value,
    group of rows and draw, and its number of rows. The server adds them up. A binomial response is
    averaged as the share of successes. This is `avg_predictions` of marginaleffects. For the
    response of one typical row, use `fit.effects`; for that of each row, `fit.predict`.

    Args:
        fit: of a `hierfl.formula`, with the clients' rows.
        variable: a column that the formula reads. Default None: rows stay as they are.
        newdata: frames of fitted clients, as `hierfl.fit` takes them. Default "rows": those of the
            fit, which suffice unless a term combines `variable` with another column.
        values: values of the column. Default None: all levels; for a number, its mean and one sd
            below and above it.
        by: the column of clients, or any column of the frames in `newdata`: an average for each of
            its values. Default None: one average over all rows.
        scale: "response": the mean of the response, or the probabilities of its levels; "link": the
            linear predictor.
        **drawing: `prob`, `draws` and `seed`.

    Returns:
        One row per group of rows, value and level of the response: the columns `by` and `variable`,
        if there are any.

    Raises:
        TypeError: the fit is of another model.
        KeyError: the formula reads no such column; or a client of `newdata` was not fitted.
        ValueError: a value is not a level; `newdata` is "rows", and a term combines `variable` with
            another column, or `by` is not the column of clients; or groups within a client of
            `newdata` are not those of the fit.
        RowsNotSaved: `newdata` is "rows", and the rows were not saved with the fit.
    """
    expect(scale=(scale, SCALES))
    draws = drawn(fit, "predictions", **drawing)
    settings, dims, what = [Intervention()], dict[str, Any](), "rows as they are"
    if variable is None and values is not None:
        raise ValueError("values needs variable: name the column of these values")
    if variable is not None:
        (column,) = chosen(draws.formula, [variable]).values()
        grid = few(column) if values is None else several(variable, column, values, least=1)
        settings = [Intervention(variable, value) for value in grid]
        dims, what = {variable: grid}, f"{variable} set in all rows"
        if by == variable:
            raise ValueError(f"by is '{by}', which is set in all rows: leave out one of the two")
    mean = averages(draws, newdata, settings, by, scale)
    response = draws.formula.declared.parts.response
    return Estimates.of(
        f"{response}, averaged over clients' rows{f' by {by}' if by else ''}, {what}",
        labeled(mean.draws, {**mean.dims, **dims, "level": mean.levels}, response),
        draws,
    )
