"""Columns that are no predictors, such as an ID or a date, and values too far from all clients' to be believed."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hierfl.formulas.answers import OfColumn
from hierfl.formulas.columns import Column
from hierfl.formulas.schema import Schema

Floats = NDArray[np.float64]
SOME = 10  # levels or rows, from which on as many values as rows are names of the rows
DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?:[T ].*)?")
# "id", "patient_id", "PatientID", "record no"; not "paid"
NAME = re.compile(
    r"(?i:(?:.*[\W_])?(?:p?id|uuid|mrn|ssn)|.*(?:patient|subject|person|record|case)[\W_]?(?:no|nr|number|code))"
    r"|.*[a-z](?:Id|ID)"
)


def is_identifier(levels: int, rows: int) -> bool:
    """Return whether a category names its rows, as an ID or a date does, rather than kinds of rows.

    >>> is_identifier(448, 448), is_identifier(12, 448), is_identifier(4, 4)
    (True, False, False)
    """
    return levels >= SOME and 2 * levels > rows


def refuse_identifier(name: str, answers: Collection[OfColumn], least: int) -> None:
    """Refuse a category that names rows, such as an ID, and one of dates."""
    levels = dict.fromkeys(level for answer in answers for level in (answer.counts or {}))
    rows = sum(sum((answer.counts or {}).values()) for answer in answers)
    if least > 1 and not levels and all(answer.counts == {} for answer in answers):
        return  # agreed beforehand, or named by no client: `with_rare` refuses it
    fix = ""
    if len(levels) >= SOME and all(map(DATE.fullmatch, levels)):
        fix = "which are dates, read as categories: make it numbers, days since a day, "
        fix += f"(pandas.to_datetime(frame['{name}']) - day).dt.days, or the year"
    elif is_identifier(len(levels), rows):
        fix = f"as an ID has, each with a coefficient: take it out, or write (1 | {name}) if "
        fix += "several rows share a value"
    if fix:
        raise ValueError(f"column '{name}' has {len(levels)} levels in {rows} rows, {fix}")


def warn_of_identifiers(columns: Mapping[str, Floats], clients: int) -> None:
    """Warn of numbers that name rows: all whole and different, and called an ID, counted up, or dates.

    A population count is none of these. Years count up at one client, but not over several.
    """
    for name, rows in sorted(columns.items()):
        values = np.sort(rows[np.isfinite(rows)])
        if len(values) < SOME or (values % 1.0).any():
            continue
        differ, kind = bool((np.diff(values) > 0.0).all()), ""
        counts_up = clients > 1 and bool((np.diff(values) == 1.0).all())
        if differ and (counts_up or NAME.fullmatch(name)):
            kind, fix = "as an ID has", "take it out"
        elif are_days(values):
            kind, fix = "which are dates such as 20240131", "make them days since a day"
        if kind:
            many = f"{len(np.unique(values))} different whole numbers in {len(values)} rows"
            warnings.warn(
                f"column '{name}' has {many}, {kind}, and is read as a number with one slope: {fix}",
                stacklevel=4,
            )


def are_days(values: Floats) -> bool:
    """Return whether all whole numbers are days from 1900 to 2099, written as 20240131, and some differ."""
    years, months, days = values // 1e4, values // 1e2 % 1e2, values % 1e2
    are_days = (years >= 1900) & (years < 2100) & (months >= 1) & (months <= 12)
    are_days &= (days >= 1) & (days <= 31)
    return bool(are_days.all()) and len(np.unique(values)) >= SOME


FAR = 8.0  # sds of the other rows, from their mean
# of a client's values above 0, if none is below it, whose logarithms must be far out too
FAR_LOGS = 5.0
SOME_ROWS = 10  # of a client, which tell of two values, and of a long tail


def warn_of_far_values(
    columns: Mapping[str, Floats], schema: Schema, clients: Sequence[str], counts: NDArray[np.int64]
) -> None:
    """Warn of numbers of clients' rows, one client after another, that are far from all, without their values."""
    owner = np.repeat(np.arange(len(clients)), counts)
    for name, every in sorted(columns.items()):
        column = schema.columns[name]
        far_rows = is_far(every, column.mean, column.sd, schema.rows, FAR)
        for place in np.unique(owner[far_rows]).tolist():
            values = every[owner == place]
            values = values[~np.isnan(values)]
            if _has_two_values(column, values):
                continue
            far = is_far(values, column.mean, column.sd, schema.rows, FAR)
            if values.min() >= 0.0 and (values > 0.0).sum() >= SOME_ROWS:
                # incomes and counts have long tails; far values are above 0
                logs = np.log(values[values > 0.0])
                far[values > 0.0] &= is_far(logs, logs.mean(), logs.std(), len(logs), FAR_LOGS)
            if count := int(far.sum()):
                many = f"{count} value{'s' if count > 1 else ''} more than {FAR:g} sds"
                what = (
                    f"column '{name}' of client '{clients[place]}' has {many} from the mean of all"
                )
                fix = "check the unit, and for typing errors"
                warnings.warn(f"{what} other rows: {fix}", stacklevel=4)


def is_far(
    values: NDArray[np.float64], mean: float, sd: float, rows: int, times: float
) -> NDArray[np.bool_]:
    """Return which values are more than so many sds of the other rows from their mean, (n,).

    A value is set aside, since n rows hold none that is farther than sqrt(n) of their own sds.
    """
    distance, ratio = np.abs(values - mean), rows / max(rows - 1, 1)
    others = ratio * (sd**2 - distance**2 / max(rows - 1, 1))
    is_among = others > 1e-9 * sd**2  # else the others have no spread, or it is a new row
    spread = np.sqrt(np.where(is_among, others, sd**2))
    far: NDArray[np.bool_] = distance * np.where(is_among, ratio, 1.0) > times * spread
    return far


def _has_two_values(column: Column, values: NDArray[np.float64]) -> bool:
    """Return whether a column is of two values, one of which may be rare: 0 and 1, or others."""
    is_binary = math.isclose(column.sd**2 + column.mean**2, column.mean, rel_tol=1e-9)
    return is_binary or (len(values) >= SOME_ROWS and len(np.unique(values)) <= 2)
