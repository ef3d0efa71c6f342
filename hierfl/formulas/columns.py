"""The columns of a client's frame, as numbers or categories, checked against the agreed schema; their sums."""

import numbers as numbers_of
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hierfl.core.arguments import shown
from hierfl.core.typed_json import Count, Spread, Value
from hierfl.data.consistency import SPELLING, RowsFault, check_has, is_frame, look_alike
from hierfl.data.frames import is_number


class OneFrame(Mapping[str, Any]):
    """Client -> its rows: a slice of one frame, made when it is read, since 10,000 take seconds."""

    def __init__(self, whole: pd.DataFrame, counts: Mapping[str, int]) -> None:
        self.whole, self.names = whole, tuple(counts)
        ends = pairwise([0, *np.cumsum([*counts.values()]).tolist()])
        self.rows = {name: slice(*of) for name, of in zip(self.names, ends, strict=True)}

    def __getitem__(self, name: str) -> pd.DataFrame:
        return self.whole.iloc[self.rows[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def joined(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return all clients' rows, one client after another."""
    if isinstance(frames, OneFrame):
        return frames.whole
    return pd.concat(frames.values()) if len(frames) > 1 else next(iter(frames.values()))


def ends_of(frames: Mapping[str, pd.DataFrame]) -> NDArray[np.int64]:
    """Return where each client's rows end among all of them, (N,)."""
    if isinstance(frames, OneFrame):
        return np.array([rows.stop for rows in frames.rows.values()], dtype=np.int64)
    return np.cumsum([*map(len, frames.values())])


# brms's words for its codes of censoring
CENSORED = {"none": 0, "right": 1, "left": -1, "interval": 2, "False": 0, "True": 1}
Kind = Literal["number", "category"]
Names = NDArray[np.str_]


@dataclass(frozen=True)
class Column:
    """What clients agree on about one column.

    Args:
        kind: "number" or "category".
        unit: of a number, such as "years"; "" where none was declared.
        mean: of a number over all rows.
        sd: of a number over all rows.
        levels: of a category, in order; the first is the reference.
        rare: the level that stands for all levels not listed; "" where they are refused.
    """

    kind: Kind
    unit: str = ""
    mean: Value = 0.0
    sd: Spread = 0.0
    levels: tuple[str, ...] = ()
    rare: str = ""

    def __post_init__(self) -> None:
        if len({*self.levels}) < len(self.levels):
            raise ValueError("a level of the column stands twice")


def column_fault(detail: str, public: str, name: str, client: str) -> RowsFault:
    """Return a fault of a client's column: `detail` stays at the client, and `public` may leave it."""
    return RowsFault(f"{column_of(name, client)} {detail}", f"column '{name}' {public}")


def column_of(name: str, client: str) -> str:
    """Return a column of a client, in words; `client` is "" where all rows are in one frame."""
    return f"column '{name}'" + (f" of client '{client}'" if client else "")


def by_client(frames: Any, clients: str) -> Mapping[str, pd.DataFrame]:
    """Return each client's rows by its name, from one frame or from {client: frame}."""
    if isinstance(frames, pd.DataFrame):
        return _split(frames, clients)
    if not isinstance(frames, Mapping) or not all(map(is_frame, frames.values())):
        fix = f"give one pandas frame with the column '{clients}', or {{name: frame}}"
        fix += "; pandas.read_csv reads a file" if isinstance(frames, str | Path) else ""
        raise TypeError(f"frames is {shown(frames)}: {fix}")
    _refuse_one_name(frames, "the names of the frames")
    refuse_similar(list(map(str, frames)), "the names of the frames")
    if fault := next(_faults_of_frames(frames, clients), None):
        raise fault
    return {level_name(name): frame for name, frame in frames.items()}


def _faults_of_frames(frames: Mapping[Any, pd.DataFrame], clients: str) -> Iterator[ValueError]:
    if not frames:
        yield ValueError("frames is empty: give the frame of at least one client")
    for name, frame in frames.items():
        if not len(frame):
            public = f"client '{name}' has no rows"
            yield RowsFault(f"{public}: leave it out, or give it at least one", public)
        if clients in frame and frame[clients].nunique() > 1:
            what = f"{frame[clients].nunique()} clients in its column '{clients}'"
            yield ValueError(f"the frame of client '{name}' has {what}: give the frame itself")


def _split(frame: pd.DataFrame, clients: str) -> OneFrame:
    """Return the rows of each client of one frame; numbers and categories are in their order."""
    check_has(frame, clients, "for the clients, the frame")
    names = named(frame[clients], clients, "the frame")
    if (names == "").any():
        row = int((names == "").argmax())
        fix = f"name it, or leave such rows out, frame.dropna(subset=['{clients}'])"
        raise ValueError(f"column '{clients}' has no client in row {row}: {fix}")
    if not len(names):
        raise ValueError("the frame has no rows: give at least one row of one client")
    clients_here, code = np.unique(names, return_inverse=True)
    of: Any = float if frame[clients].dtype.kind in "iuf" else str
    if hasattr(frame[clients], "cat"):
        ranks = {level_name(of): i for i, of in enumerate(frame[clients].cat.categories)}
        of = ranks.__getitem__
    order = sorted(range(len(clients_here)), key=lambda i: of(clients_here[i]))
    place, counts = np.argsort(order), np.bincount(code)
    whole = frame.take(place[code].argsort(kind="stable"))
    return OneFrame(whole, {str(clients_here[i]): int(counts[i]) for i in order})


def kind_of(series: Any, name: str, client: str) -> Kind:
    """Return whether a column holds numbers or categories; refuse dates and digits as strings."""
    if hasattr(series, "cat"):
        return "category"
    if series.dtype.kind in "iufb":
        return "number"
    is_text = isinstance(series.dtype, pd.StringDtype)
    # each text once: of a thousand rows most have those of others
    values = (series.drop_duplicates() if is_text else series)[lambda of: ~missing_in(of)].tolist()
    words = [v for v in values if isinstance(v, str)]
    others = [v for v in values if not isinstance(v, str)]
    if not words and all(isinstance(v, numbers_of.Real | np.bool_) for v in others):
        return "number"  # of dtype object
    digits = next(filter(is_number, words), None)
    if not others and digits is None:
        return "category"
    public, what = "holds numbers as strings", f"holds the number '{digits}' as a string"
    if others and all(isinstance(v, date) for v in values):
        public = what = "holds dates"
    elif others:
        public, what = "is neither all numbers nor all strings", f"holds {(words or others)[0]!r}"
    fix = "make it numbers, such as days since a day, or a category if it holds names, or leave it out"
    raise column_fault(f"{what}: {fix}", public, name, client)


def holds_numbers(series: Any, kind: Kind | None, name: str, client: str = "") -> bool:
    """Return whether a column is read as numbers; None: as it is, and True and False are categories."""
    if kind is not None:
        return kind == "number"
    is_boolean = pd.api.types.infer_dtype(series) == "boolean"
    return not is_boolean and kind_of(series, name, client) == "number"


def numbers(series: Any) -> NDArray[np.float64]:
    """Return a column of numbers as float64, NaN where it is missing."""
    known = series.mask(missing_in(series)) if series.dtype.kind == "O" else series
    values: NDArray[np.float64] = pd.to_numeric(known).to_numpy(dtype=np.float64, na_value=np.nan)
    return values


def number_column(series: Any, name: str, client: str) -> NDArray[np.float64]:
    """Return a column that the formula reads as a number, NaN where it is missing; refuse words."""
    if kind_of(series, name, client) != "number":
        what = "and the formula reads it as a number"
        value = f"holds {series.tolist()[0]!r}, {what}: convert it"
        raise column_fault(value, f"holds words, {what}", name, client)
    return numbers(series)


def named(series: Any, name: str, client: str) -> Names:
    """Return the names of a column's values, (n,), "" where one is missing; 1.0 is named "1"."""
    short = series.dtype in ("float16", "float32")  # whose 0.1 is that of another client's float64
    values = [float(str(v)) for v in series.to_numpy()] if short else series.tolist()
    missing, is_text = missing_in(series), isinstance(series.dtype, pd.StringDtype)
    names = np.array(values if is_text else [level_name(v) for v in values], dtype=np.str_)
    names[missing] = ""
    where = column_of(name, client)
    if series.dtype.kind not in "iuf" and not is_text:
        categories = series.cat.categories if hasattr(series, "cat") else series[~missing]
        _refuse_one_name(categories, where)
    refuse_similar(set(names.tolist()) - {""}, where)
    return names


def refuse_similar(names: Collection[str], where: str) -> None:
    """Refuse names that differ only in how they are written."""
    listed = sorted(names)
    if similar := look_alike(listed):
        how = f"of {where} differ only in {SPELLING}"
        what = f"values {similar[0]!r} and {similar[1]!r} {how}: make them the same"
        raise RowsFault(what, f"two values {how}")
    if {"True", "False"} & {*names} and {"0", "1"} & {*names}:
        public = f"{where} holds True or False here and 1 or 0 there"
        raise RowsFault(f"{public}: make them the same", public)


def _refuse_one_name(values: Iterable[Any], where: str) -> None:
    """Refuse two values that would have one name, such as 1 and "1"."""
    first: dict[str, Any] = {}
    for value in values:
        name = level_name(value)
        if first.setdefault(name, value) != value:
            what = f"values {first[name]!r} and {value!r} of {where} are both '{name}'"
            raise ValueError(f"{what}: make them the same, or rename one")


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Return the different names in order: numerical where all are numbers, else alphabetical."""
    different = sorted(set(names) - {""})
    return tuple(sorted(different, key=float) if all(map(is_number, different)) else different)


def level_name(value: Any) -> str:
    """Return the name of a value as a category: 1.0 is named "1"."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def missing_in(series: Any) -> NDArray[np.bool_]:
    """Return which values of a column are missing, (n,), also by blanks; a text such as "nan" is a name."""
    kind = series.dtype.kind
    if isinstance(series.dtype, np.dtype) and kind in "biuf":  # at a tenth of pandas's cost
        return np.isnan(series.to_numpy()) if kind == "f" else np.zeros(len(series), dtype=bool)
    # of the array, since a series takes five times as long
    missing: NDArray[np.bool_] = np.array(series.array.isna())
    if kind == "O":
        there = series.array[~missing].tolist()
        missing[~missing] = [isinstance(v, str) and not v.strip() for v in there]
    return missing


# ------------------------------------------------------------ one client's frame
def complete(
    frame: pd.DataFrame, columns: Mapping[str, Kind | None], client: str, missing: str
) -> pd.DataFrame:
    """Return a client's rows without those that miss a value; "refuse" refuses them."""
    return without(frame, incomplete(frame, columns, client, missing), client)


def without(frame: pd.DataFrame, gone: NDArray[np.bool_], client: str) -> pd.DataFrame:
    """Return a client's rows without those that are `gone`, (n,)."""
    if gone.all():
        what = f"every row of client '{client}' lacks a value: leave the client out, or fill them"
        raise RowsFault(what, "every row lacks a value of the formula's columns")
    return frame[~gone] if gone.any() else frame


def complete_rows(
    frames: Mapping[str, pd.DataFrame], columns: Mapping[str, Kind | None], missing: str
) -> Mapping[str, pd.DataFrame]:
    """Return each client's rows without those that miss a value; "refuse" refuses them."""
    with suppress(KeyError, TypeError, ValueError):  # of which client is found out below
        if len(frames) > 1 and not incomplete(joined(frames), columns, "", missing).any():
            return frames
    return {name: complete(frame, columns, name, missing) for name, frame in frames.items()}


def incomplete(
    frame: pd.DataFrame, columns: Iterable[str], client: str, missing: str
) -> NDArray[np.bool_]:
    """Return which rows of a client miss a value, (n,); "refuse" refuses them."""
    gone = np.zeros(len(frame), dtype=bool)
    for name in columns:
        check_column(frame, name, client)
        lost = missing_in(frame[name])
        infinite = frame[name].dtype.kind == "f" and np.isinf(frame[name].to_numpy())
        if lost.any() and missing == "refuse":
            many = f"{int(lost.sum())} of {len(lost)} values, the first in row {int(lost.argmax())}"
            fix = "fill them, or leave their rows out with formula(..., missing='drop')"
            raise column_fault(f"is missing {many}: {fix}", "has missing values", name, client)
        if np.any(infinite):
            detail = f"is infinite in row {int(np.argmax(infinite))}: fix the value"
            raise column_fault(detail, "has an infinite value", name, client)
        gone |= lost
    return gone


def check_column(frame: pd.DataFrame, name: str, client: str) -> None:
    """Refuse a client's frame without a column, or with two of its name."""
    check_has(frame, name, f"client '{client}'" if client else "the frame")


def index_in(levels: Sequence[str], names: Any) -> NDArray[np.int64]:
    """Return the index of each name among levels, (n,), -1 where it is none of them."""
    index: NDArray[np.int64] = pd.Index(levels, dtype=object).get_indexer(names)
    return index


def coded(series: Any, name: str, client: str, column: Column) -> NDArray[np.int64]:
    """Return the index of each value among a category's levels, (n,); refuse other values."""
    names = named(series, name, client)
    codes = index_in(column.levels, names)
    codes[codes < 0] = index_in(column.levels, [column.rare])[0]
    if (codes < 0).any():
        row, levels = int((codes < 0).argmax()), ", ".join(column.levels)
        fix = f"correct it, or fit with it: hierfl.schema(..., levels={{'{name}': [...]}})"
        what = f"has the value '{names[row]}' in row {row}, not one of {levels}: {fix}"
        raise column_fault(what, "has a value that is not an agreed level", name, client)
    return codes


def prepared(frame: pd.DataFrame, columns: Mapping[str, Column], client: str) -> pd.DataFrame:
    """Return columns for `formulae`: numbers as float64, categories with all agreed levels."""
    ready: dict[str, Any] = {}
    for name, column in columns.items():
        series = frame[name]
        unit = str(frame.attrs.get("units", {}).get(name, ""))
        if unit and column.unit and unit != column.unit:
            what = f"is in {unit}, and clients have agreed on {column.unit}: convert it"
            public = "is not in the unit that clients have agreed on"
            raise column_fault(what, public, name, client)
        if column.kind == "category":
            codes, levels = coded(series, name, client, column), list(column.levels)
            ready[name] = pd.Categorical.from_codes(codes, categories=levels, ordered=True)
        else:
            ready[name] = number_column(series, name, client)
    return pd.DataFrame(ready, index=range(len(frame)))


# ------------------------------------------------------------ sums
@dataclass(frozen=True)
class ColumnSums:
    """A client's count, sum and sum of squares of one argument."""

    count: Count
    total: float
    squares: float


def sums(values: NDArray[np.float64]) -> ColumnSums:
    """Return a client's count, sum and sum of squares."""
    return ColumnSums(len(values), float(values.sum()), float((values**2).sum()))


def moments(sums_of_clients: Sequence[ColumnSums]) -> tuple[float, float]:
    """Return mean and sd over all clients, the sd with n in the denominator."""
    count, total, squares = 0, 0.0, 0.0
    for own in sums_of_clients:
        count, total, squares = count + own.count, total + own.total, squares + own.squares
    if not count:
        fix = "take it out of the formula"
        raise ValueError(f"no client has enough values of a column of mi(): {fix}")
    mean = total / count
    variance = squares / count - mean**2
    # The rounding error of a difference of two large sums may exceed a small variance.
    rounding = 1e-14 * squares / count
    return mean, float(np.sqrt(variance)) if variance > 16 * rounding else 0.0
