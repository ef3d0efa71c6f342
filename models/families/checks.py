"""Which values responses and their row fields may have, by kind of family."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hierfl.data.frames import is_number

Numbers = NDArray[np.float64]
CODES = (0, 1, -1, 2)
SUM = 1e-6  # by how much the sum of shares may differ from 1
CENS = "it must be 0 (exact), 1 (right), -1 (left) or 2 (interval)"
# kind of values -> which are allowed, and in words
ALLOWED: dict[str, tuple[Callable[[Numbers], NDArray[np.bool_]], str]] = {
    "real": (np.isfinite, "a finite number"),
    "positive": (lambda x: x > 0, "a number above 0"),
    "time": (lambda x: x > 0, "a time above 0"),
    "amount": (lambda x: x >= 0, "a number of 0 or more"),
    "count": (lambda x: (x >= 0) & _whole(x), "a count 0, 1, 2, ..."),
    "binary": (lambda x: (x == 0) | (x == 1), "0 or 1"),
    "unit": (lambda x: (x > 0) & (x < 1), "a number strictly between 0 and 1"),
    "share": (lambda x: (x >= 0) & (x <= 1), "a number from 0 to 1"),
    "angle": (lambda x: abs(x) <= np.pi + 1e-6, "an angle from -pi to pi, in radians"),
    "counts": (lambda x: (x >= 0) & _whole(x), "counts 0, 1, 2, ..."),
    "shares": (lambda x: (x > 0) & (x < 1), "shares strictly between 0 and 1"),
    "category": (lambda x: (x >= 0) & _whole(x), "a level, or its code 0, 1, 2, ..."),
    "ordered": (lambda x: (x >= 0) & _whole(x), "a level, or its code 0, 1, 2, ..."),
}


FIXES = {
    "binary": "use family='poisson' for counts, 'binomial' for successes among trials, 'beta' for "
    "shares, or 'gaussian'",
    "positive": "use family='poisson' for counts, 'hurdle_gamma' for amounts with zeros, or "
    "'gaussian'",
    "time": "give a time above 0 (an interval from 0 on is its upper end, with cens -1)",
    "count": "use family='gamma' for positive amounts, or 'gaussian'",
    "unit": "use family='ordered_beta' for shares with 0 and 1, 'bernoulli' for these "
    "alone, or 'gaussian'",
    "share": "divide percentages by 100, or use family='gaussian'",
    "category": "give the levels as text",
    "ordered": "give the levels as text",
    "angle": "take numpy.deg2rad of degrees, and subtract 2 pi from angles above pi",
    "counts": "use family='dirichlet' for shares",
    "shares": "use family='multinomial' for counts; shares of 0 and 1 have no density",
}  # kind of values -> what to do about another one


def _whole(x: Numbers) -> NDArray[np.bool_]:
    return x == np.floor(x)


def check_values(family: str, kind: str, values: ArrayLike) -> None:
    """Refuse responses (N,), or (N, K) in parts, outside of what a kind of `ResponseFamily` allows."""
    column = np.asarray(values)
    if kind in ("counts", "shares") and column.ndim < 2:
        raise ValueError(
            f"the response of family '{family}' is one column: it has several, (N, K); in a "
            "formula write cbind(a, b, c) ~ ..."
        )
    if column.dtype.kind in "OUS" and kind in ("category", "ordered"):
        missing = [value != value or value is None for value in column.tolist()]
        _refuse_missing(np.array(missing, dtype=bool), "response")
        return
    numbers = _numbers(family, column)
    inside, words = ALLOWED[kind]
    bad = np.argwhere(~(inside(numbers) & np.isfinite(numbers)))
    if bad.size:
        value = float(numbers[tuple(bad[0])])
        raise ValueError(
            f"value {value:g} in row {bad[0][0]}: a response of family '{family}' is {words}; {_fix(kind, value)}"
        )
    if kind == "shares":
        total = numbers.sum(-1)
        fix = "divide the row's shares by their sum"
        _refuse(abs(total - 1.0) > SUM, "the sum of shares", total, fix)


def check_additions(family: str, values: ArrayLike, additions: Mapping[str, ArrayLike]) -> None:
    """Refuse row fields ("trials", "cens", "upper", "entry") that do not fit the responses (N,)."""
    rows = {name: _numbers(family, np.asarray(column), name) for name, column in additions.items()}
    y = _numbers(family, np.asarray(values))
    in_parts, y = y.ndim > 1, y.sum(-1) if y.ndim > 1 else y
    for name, column in rows.items():
        if column.shape != y.shape:
            raise ValueError(
                f"'{name}' has {column.size} values for {y.size} responses: give one a row"
            )
    cens = rows.get("cens", np.zeros_like(y))
    if "trials" in rows and in_parts:
        fix = "trials must be the sum of the row's counts"
        _refuse(rows["trials"] != y, "trials", rows["trials"], fix)
    elif "trials" in rows:
        trials = rows["trials"]
        fix = "trials must be whole, 0 or more, and no fewer than the row's successes"
        _refuse(~((trials >= y) & _whole(trials) & np.isfinite(trials)), "trials", trials, fix)
    _refuse(~np.isin(cens, CODES), "cens", cens, CENS)
    interval = cens == 2
    if "entry" in rows:
        entry = rows["entry"]
        fits = (entry >= 0) & ((entry < y) | (interval & (entry == y)))
        _refuse(~fits, "entry", entry, "it must be 0 or more, and below the row's time")
    if "upper" in rows:
        bad = interval & ~((rows["upper"] > y) & np.isfinite(rows["upper"]))
        fix = "it must be above the row's time and finite; a time with no upper end has cens 1"
        _refuse(bad, "upper", rows["upper"], fix)
    elif interval.any():
        fix = "it is an interval without an upper end: add the row field 'upper'"
        _refuse(interval, "cens", cens, fix)


def _refuse(bad: NDArray[np.bool_], name: str, column: Numbers, fix: str) -> None:
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(f"{name} {column[row]:g} in row {row}: {fix}")


def _refuse_missing(missing: NDArray[np.bool_], name: str) -> None:
    if missing.any():
        raise ValueError(f"the {name} in row {np.argwhere(missing)[0][0]} is missing: drop the row")


def _numbers(family: str, column: NDArray[np.generic], name: str = "response") -> Numbers:
    """Return a column as float64, refusing words and missing values; `upper` may be missing."""
    try:
        numbers: Numbers = column.astype(np.float64)
    except (TypeError, ValueError) as error:
        row, value = next((i, v) for i, v in enumerate(column.ravel().tolist()) if not is_number(v))
        row //= max(1, column.size // max(1, len(column)))
        fix = "code it as a number"
        if name == "cens":
            fix = CENS
        elif name == "response":
            fix += ", or use family='categorical'"
        raise ValueError(
            f"the {name} in row {row} is {value!r}, and family '{family}' needs numbers: {fix}"
        ) from error
    if name != "upper":
        _refuse_missing(np.isnan(numbers), name)
    return numbers


def _fix(kind: str, value: float) -> str:
    """Return what to do about a value that a kind of response does not have."""
    if not np.isfinite(value):
        return "drop the row"
    return FIXES.get(kind, "use family='gaussian'")


def check_bounds(values: ArrayLike, bounds: tuple[float, float]) -> None:
    """Refuse responses (N,) beyond the bounds of a truncated family."""
    y = np.asarray(values, dtype=np.float64)
    low, high = bounds
    fix = f"trunc() says that only values from {low:g} to {high:g} are recorded: correct its bounds"
    _refuse((y < low) | (y > high), "value", y, fix)
