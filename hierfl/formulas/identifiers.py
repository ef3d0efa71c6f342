"""Columns that name their rows, such as an ID or a date, and are no predictors."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from hierfl.formulas.answers import OfColumn

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
        elif _are_days(values):
            kind, fix = "which are dates such as 20240131", "make them days since a day"
        if kind:
            many = f"{len(np.unique(values))} different whole numbers in {len(values)} rows"
            warnings.warn(
                f"column '{name}' has {many}, {kind}, and is read as a number with one slope: {fix}",
                stacklevel=4,
            )


def _are_days(values: Floats) -> bool:
    """Return whether all whole numbers are days from 1900 to 2099, written as 20240131, and some differ."""
    years, months, days = values // 1e4, values // 1e2 % 1e2, values % 1e2
    are_days = (years >= 1900) & (years < 2100) & (months >= 1) & (months <= 12)
    are_days &= (days >= 1) & (days <= 31)
    return bool(are_days.all()) and len(np.unique(values)) >= SOME
