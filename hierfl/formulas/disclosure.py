"""What sums of a client's rows may tell: none is a sum of fewer than `least` rows, also in combination.

Columns C with a constant, (n, p), have the hat matrix H = C (C'C)^-1 C'. Some combination of their
sums is of the rows S alone, up to the share 1 - e of its squares, where H_SS has an eigenvalue of e
or more. Its trace is at least that, so S has a row with h_ii >= e / |S|.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hierfl.formulas.columns import ColumnSums, holds_numbers, numbers, sums
from hierfl.formulas.declaration import Declaration

Floats = NDArray[np.float64]
# of the squares of a combination, from which on it is of a few rows: of a column that rows have, of one
# that a formula makes, and of zeros and ones
SHARE, NEARLY, EXACT = 0.99, 1.0 - 1e-4, 1.0 - 1e-6
MOST_CHECKED = 500  # rows of high leverage
TINY = 1e-300
TIMES = 50  # that rows are moved, after which nothing is told


NOTHING = ColumnSums(0, 0.0, 0.0)


def isolated(columns: Floats, least: int, share: float = SHARE) -> NDArray[np.int64]:
    """Return fewer than `least` rows that sums of columns, (n, p), tell about; none where they do not."""
    none = np.zeros(0, dtype=np.int64)
    if least < 2 or not columns.size:
        return none
    centered = columns - columns.mean(0)
    size = np.sqrt((centered**2).mean(0))
    varied = size > 1e-12 * np.abs(columns).max(0)
    u, s, _ = np.linalg.svd(centered[:, varied] / size[varied], full_matrices=False)
    basis = np.hstack([np.full((len(columns), 1), len(columns) ** -0.5), u[:, s > 1e-8 * s[:1]]])
    # all but as many rows as there are columns can always be singled out
    least = min(least, len(basis) - basis.shape[1] + 1)
    if least < 2:
        return none
    leverage = (basis**2).sum(1)
    high = np.flatnonzero(leverage >= share / (least - 1))
    for row in high[np.argsort(-leverage[high])][:MOST_CHECKED]:
        similar = np.argsort(-np.abs(basis @ basis[row]), kind="stable")[: least - 1]
        if _largest(basis[similar]) > share:
            count = next(k for k in range(1, least) if _largest(basis[similar[:k]]) > share)
            return similar[:count]
    return none


def tells_of_few(columns: Floats, least: int) -> bool:
    """Return whether a combination of columns, (n, p), is of fewer than `least` rows, or they are about n."""
    rank = np.linalg.matrix_rank(columns - columns.mean(0)) if columns.size else 0
    return least > 1 and (rank + least > len(columns) or len(isolated(columns, least, EXACT)) > 0)


def _largest(some: Floats) -> float:
    return float(np.linalg.eigvalsh(some @ some.T)[-1])


def singled_out(
    values: Floats, least: int, degree: int = 1, *, by_value: bool = True, share: float = NEARLY
) -> NDArray[np.int64]:
    """Return fewer than `least` rows that sums of values to the power of up to 2 `degree` tell about.

    They have all squares of a combination of powers, or a `share` of those of one, or, `by_value`, share
    a value, of which there are no more than powers, so that the rows of each can be solved for.
    """
    none = np.zeros(0, dtype=np.int64)
    if least < 2 or not len(values) or not (spread := values.std()):
        return none
    powers = ((values - values.mean()) / spread)[:, None] ** np.arange(1, 2 * degree + 1)
    sets = [powers] if by_value and len(np.unique(values)) <= 2 * degree + 1 else []
    sets += [powers[:, k : k + 1] for k in range(degree)]
    # of a handful of rows, any few have nearly all squares
    ways = ((least, EXACT), (min(least, len(values) // 4 + 1), share))
    together = [isolated(powers, least, EXACT)] if degree > 1 else []
    every_few = chain(together, (isolated(of, *way) for of in sets for way in ways))
    return next((rows for rows in every_few if len(rows)), none)


def coarse(values: Floats, least: int, *, by_value: bool = True, share: float = NEARLY) -> Floats:
    """Return values, (n,), of which sums and sums of squares tell about no few rows (`singled_out`).

    Those that they would tell about become the nearest other value, and NaN stays. Where that does
    not suffice, or would make all values those of a few rows, none is returned, (0,).
    """
    there = np.isfinite(values)
    if least < 2 or not len(own := values[there]):
        return values
    for _ in range(TIMES):
        few = singled_out(own, least, by_value=by_value, share=share)
        if not len(few):
            break
        others = np.unique(np.delete(own, few))
        place = np.searchsorted(others, own[few]).clip(1, max(len(others) - 1, 1))
        low, high = others[place - 1], others[np.minimum(place, len(others) - 1)]
        own[few] = np.where(own[few] - low <= high - own[few], low, high)
    else:
        return values[:0]
    if (own != values[there]).sum() > max(len(own) // 4, 1):
        return values[:0]
    made = values.copy()
    made[there] = own
    return made


def told(values: Floats, least: int) -> ColumnSums:
    """Return the sums of values that may leave."""
    return sums(coarse(values, least))


def coarse_frame(
    frame: Any, kinds: Mapping[str, Any], declared: Declaration | None, least: int
) -> Any:
    """Return a frame whose columns of numbers are `coarse`, so that all sums are of the same values.

    Rounds send sums of a response, and of what stands beside it, as it is: few rows may share a value.
    """
    return with_coarse(
        frame, {name: of for name, _, of in coarse_columns(frame, kinds, declared, least)}
    )


def with_coarse(frame: Any, made: dict[str, Floats]) -> Any:
    """Return a frame with what is made of some of its columns."""
    for name, values in made.items():
        if not len(values):  # they cannot be told about at all: only that they are there
            made[name] = np.where(np.isfinite(numbers(frame[name])), 0.0, np.nan)
    return frame.assign(**made) if made else frame


def coarse_columns(
    frame: Any, kinds: Mapping[str, Any], declared: Declaration | None, least: int
) -> Iterator[tuple[str, Floats, Floats]]:
    """Yield the name and the values of each column of numbers, and what is made of them."""
    outcomes = outcomes_of(declared)
    for name, kind in kinds.items() if least > 1 else ():
        with suppress(ValueError):  # what holds other values is refused where it is read
            if name in frame and holds_numbers(frame[name], kind, name):
                values, by_value = numbers(frame[name]), name not in outcomes
                yield name, values, coarse(values, least, by_value=by_value, share=SHARE)


def outcomes_of(declared: Declaration | None) -> set[str]:
    """Return the columns of a response, and of what stands beside it."""
    parts = None if declared is None else declared.parts
    return {*parts.labels, *parts.additions.values()} if parts else set()


class Told(NamedTuple):
    """Sums of columns that may leave together, of `coarse` values, (n,), and those of the `exact` sums."""

    sums: dict[str, ColumnSums]
    coarse: dict[str, Floats]
    exact: dict[str, Floats]


def told_together(
    columns: Mapping[str, Floats], curves: Iterable[Collection[str]], least: int
) -> Told:
    """Return what may be told of the columns of a design, (n,), NaN in rows whose values are not counted.

    Of `curves` that together are of a few rows no sums are told; sums of zeros and ones are rounded to
    multiples of `least` where others would tell about a few rows beside them.
    """
    made = {name: coarse(values, least) for name, values in columns.items()}
    told_sums = {name: sums(values[np.isfinite(values)]) for name, values in made.items()}
    exact = {name: values for name, values in made.items() if len(values)}
    binary = {name for name, values in exact.items() if np.isin(values, (0.0, 1.0)).all()}
    whole = {name for name, values in columns.items() if np.isfinite(values).all()}
    for names in (names for names in curves if whole.issuperset(names)):
        matrix = np.stack([columns[name] for name in names], axis=1)
        if not binary.issuperset(names) and len(isolated(matrix, least)):
            told_sums |= dict.fromkeys(names, NOTHING)
            exact = {name: values for name, values in exact.items() if name not in names}
    together = {name: values for name, values in exact.items() if name in whole}
    for name in _of_few(together, least):
        rows = len(exact.pop(name))
        count = min(least * round(told_sums[name].total / least), rows)
        told_sums[name] = ColumnSums(rows, count, count) if name in binary else NOTHING
    return Told(told_sums, made, exact)


def _of_few(columns: Mapping[str, Floats], least: int) -> set[str]:
    """Return columns without whose sums the others tell about no few rows."""
    out: set[str] = set()
    while names := [name for name in columns if name not in out and np.ptp(columns[name]) > 0.0]:
        matrix = np.stack([columns[name] for name in names], axis=1)
        isolated_rows = isolated(matrix, least, EXACT)
        if not len(isolated_rows):
            break
        at = np.zeros(len(matrix))
        at[isolated_rows] = 1.0
        scaled = (matrix - matrix.mean(0)) / matrix.std(0)
        weights = np.abs(np.linalg.lstsq(scaled, at - at.mean(), rcond=None)[0])
        out.add(names[np.flatnonzero(weights > 1e-6 * weights.max())[-1]])
    return out


def columns_of_scores(
    kind: str, mean: Floats, sd: Floats | None, counts: Floats | None
) -> dict[str, Floats]:
    """Return what scores of predictions, (n, ...), multiply each row's outcome by, (n, p): score -> columns.

    A log score is a constant and sum_i y_i c_i with the log odds c_i of a yes-or-no outcome, or the
    means over the variances of a Gaussian one; an accuracy has the class that is predicted. Columns of
    several classes are mixed: what is 0 in a row for all of them is 0.
    """
    flat = mean.reshape(len(mean), -1)
    times = 1.0 if counts is None else counts[:, None]
    mixing = np.random.default_rng(0).normal(size=(flat.shape[1], 1))
    size = np.log(np.maximum(np.abs(flat), TINY))
    if kind in ("binary", "categorical"):
        odds = size - np.log(np.maximum(1.0 - flat, TINY))
        chosen = flat > 0.5 if kind == "binary" else flat == flat.max(1, keepdims=True)
        made = {"log_score": odds, "brier": flat, "accuracy": chosen}
        return {name: times * (columns @ mixing) for name, columns in made.items()}
    weights = np.ones_like(flat) if sd is None else np.maximum(sd.reshape(flat.shape), TINY) ** -2.0
    every = [size @ mixing, weights @ mixing, (weights * flat) @ mixing]
    return {"log_score": times * np.hstack(every), "rmse": times * (flat @ mixing)}


def scores_of_few(
    scores: Mapping[str, Floats], fields: Iterable[Any], earlier: Iterable[Floats], least: int
) -> tuple[set[str], Floats]:
    """Return the scores that would tell of few rows, beside the rows' fields, (n, ...), and earlier scores.

    Also returns the columns of the other scores, (n, p). No outcome decides which they are. Where one of
    0 and 1 is multiplied by a few times the others' spread, it is known, however many these are.
    """
    none = np.zeros((len(next(iter(scores.values()))), 0))
    known = none
    for columns in chain.from_iterable(_summed(field, least) for field in fields):
        together = np.hstack([known, columns])
        known = known if tells_of_few(together, least) else together  # rounds tell as much
    few, new = set[str](), [none]
    for name, columns in scores.items():
        alone = any(len(isolated(of[:, None], least)) for of in columns.T)
        if "rmse" not in scores:  # outcomes of 0 and 1
            alone |= any(_rests_on(of) < min(least, len(of) / 4) for of in columns.T)
        if alone or tells_of_few(np.hstack([known, *earlier, *new, columns]), least):
            few.add(name)
        else:
            new.append(columns)
    return few, np.hstack(new)


def _rests_on(column: Floats) -> float:
    """Return (sum c^2)^2 / sum c^4 of a column's distances c from its mean, (n,): equal ones count all."""
    away = column - column.mean()
    squares = (away / (np.abs(away).max() or 1.0)) ** 2
    return float(squares.sum() ** 2 / np.square(squares).sum()) if squares.any() else float("inf")


def _summed(field: Any, least: int) -> Iterator[Floats]:
    """Yield columns of a field, (n, p), with which rounds may sum outcomes: of codes, those that enough rows have."""
    if field.dtype.kind not in "iu":
        yield np.nan_to_num(
            field.reshape(len(field), -1).astype(np.float64), posinf=0.0, neginf=0.0
        )
        return
    for code, count in zip(*np.unique(field, return_counts=True), strict=True):
        if field.ndim == 1 and count >= least:
            yield (field == code)[:, None] * 1.0
