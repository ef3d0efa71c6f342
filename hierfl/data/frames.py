"""Fields from the columns of a pandas frame; strings and categories become level codes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.data.arrays import Array, as_tensor, is_missing
from hierfl.data.consistency import look_alike
from hierfl.data.grouping import sort_by_client

Columns = str | Sequence[str]
Levels = Mapping[str, Sequence[str]]


@dataclass(frozen=True, eq=False)
class FrameRows:
    """Rows' positions `place` (n,) in their frames, all frame labels `index`, and who has a label, `known`.

    `clients` is the column of clients where each column is a field, so that other frames are read alike.
    """

    place: Tensor
    index: Any
    known: Tensor | None = None
    clients: str = ""

    def kept(self, rows: Tensor) -> FrameRows:
        """Return some of the rows."""
        known = None if self.known is None else self.known[rows]
        return replace(self, place=self.place[rows], known=known)

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it as tensors, to be saved with the rows; labels that are no numbers are texts."""
        plain = range(len(self.index)) if self.index.nlevels > 1 else self.index.tolist()
        texts = {"index": json.dumps(list(plain), default=str), "clients": self.clients}
        saved = {
            f"frame.{name}": torch.tensor(list(text.encode())).byte()
            for name, text in texts.items()
        }
        saved["frame.place"] = self.place
        return saved if self.known is None else {**saved, "frame.known": self.known}

    @staticmethod
    def of_tensors(saved: Mapping[str, Tensor]) -> FrameRows:
        """Read what `tensors` returned."""
        labels, place = json.loads(bytes(saved["index"].tolist())), saved["place"]
        if place.dtype != torch.int64 or not set(place.tolist()) <= set(range(len(labels))):
            raise ValueError("the rows' places are none of their frame")
        import pandas as pd  # slow to import

        clients = bytes(saved["clients"].tolist()).decode()
        return FrameRows(place, pd.Index(labels), saved.get("known"), clients)

    @property
    def order(self) -> Tensor:
        """Positions of the rows in the order of the frame, (n,)."""
        return self.place.argsort()

    @property
    def labels(self) -> list[Any]:
        """The frame's labels of the rows, in its order; their positions where two are equal."""
        at = self.place.sort().values.tolist()
        if not self.index.is_unique or self.index.nlevels > 1:
            return at
        return self.index[at].tolist()

    def arranged(self, values: Tensor, dim: int = 0) -> Tensor:
        """Return values of the rows in the frame's order, NaN at rows that were left out."""
        whole = len(self.place) == len(self.index)
        dtype = values.dtype if whole else torch.promote_types(values.dtype, torch.float32)
        shape = (*values.shape[:dim], len(self.index), *values.shape[dim + 1 :])
        found = torch.full(shape, torch.nan) if not whole else torch.empty(shape, dtype=dtype)
        return found.to(dtype).index_copy(dim, self.place, values.to(dtype))


def parts_of_frame(
    frame: Any,
    client: str,
    fields: Mapping[str, Columns],
    client_fields: Mapping[str, Columns],
    levels: Levels,
) -> dict[str, Any]:
    """Return the parts of the `ClientData` of a frame, as in `ClientData.from_frame`."""
    if not is_column(frame, client):
        raise _no_column(frame, client)
    if not fields:  # every column is a field of its own name
        read = {client, *client_fields, *chain(*map(_listed, client_fields.values()))}
        fields = {str(column): column for column in frame.columns if column not in read}
    twice = next((name for name in client_fields if name in fields), None)
    if twice is not None:
        raise ValueError(f"'{twice}' is both a field and a client field: rename one of them")
    values: dict[str, Array] = {}
    features: dict[str, tuple[str, ...]] = {}
    found: dict[str, tuple[str, ...]] = {}
    for name, wanted in {**fields, **client_fields}.items():
        if is_column(frame, wanted):
            values[name] = _column(frame, wanted, name, levels, found)
        else:
            values[name] = _columns(frame, wanted, name, levels, found)
            features[name] = tuple(map(str, wanted))
    rows = sort_by_client(frame[client], None, values)
    own = {}
    for name in client_fields:
        features.pop(name, None)
        sorted_rows = rows.fields.pop(name)
        own[name] = constant_by_client(name, sorted_rows, rows.offsets, rows.names)
    return {**rows._asdict(), "client_fields": own, "features": features, "levels": found}


def _listed(columns: Columns) -> Sequence[str]:
    return [columns] if isinstance(columns, str) else columns


def _columns(
    frame: Any, wanted: Any, name: str, levels: Levels, found: dict[str, tuple[str, ...]]
) -> Tensor:
    if not isinstance(wanted, list | tuple):
        raise _no_column(frame, wanted)
    if not wanted:
        raise ValueError(f"field '{name}' is given an empty list of columns: name at least one")
    columns: list[Tensor] = []
    for column in wanted:
        key = f"{name}[{column}]"
        columns.append(as_tensor(_column(frame, column, key, levels, found), key))
        if len(found.get(key, ())) > 2:
            raise ValueError(
                f"column '{column}' of field '{name}' has {len(found[key])} levels, "
                "whose codes are no amounts: read it as a field of its own, or as 0/1 columns "
                "(pandas.get_dummies)"
            )
    dtype = reduce(torch.promote_types, (column.dtype for column in columns))
    return torch.stack([column.to(dtype) for column in columns], dim=1)


def is_column(frame: Any, name: Any) -> bool:
    """Return whether a frame has a column of a name; refuse the name if there are several."""
    if not hasattr(frame, "columns") or not hasattr(frame, "__getitem__"):
        raise TypeError(
            f"frame is a {type(frame).__name__}: give a pandas frame, from_frame(frame, 'client', "
            f"y='y')"
        )
    count = frame.columns.tolist().count(name) if isinstance(name, Hashable) else 0
    if count > 1:
        raise ValueError(f"the frame has {count} columns '{name}': rename all but one of them")
    return count == 1


def _no_column(frame: Any, name: object) -> KeyError:
    return KeyError(f"the frame has no column '{name}': its columns are {list(frame.columns)}")


def _column(
    frame: Any, column: Any, key: str, levels: Levels, found: dict[str, tuple[str, ...]]
) -> Array:
    if not is_column(frame, column):
        raise _no_column(frame, column)
    series = frame[column]
    coded = _coded(series, column)
    if coded is None:
        if key in levels:
            raise ValueError(
                f"column '{column}' holds no strings, but levels are given for '{key}': drop them"
            )
        return series.to_numpy()
    codes, labels = coded
    if key in levels:
        codes, labels = _recoded(codes, labels, tuple(map(str, levels[key])), column)
    found[key] = labels
    return codes


def _coded(series: Any, column: Any) -> tuple[NDArray[np.int64], tuple[str, ...]] | None:
    """Return codes and levels of a column of strings or categories, else None."""
    values = series.to_numpy()
    if hasattr(series, "cat") and hasattr(series.cat, "categories"):
        categories = series.cat.categories
        if categories.dtype.kind in "iufb":
            return None  # numbers remain what they are
        codes = np.asarray(series.cat.codes, dtype=np.int64)
        labels = tuple(map(str, categories))
        missing = codes < 0
    elif values.dtype.kind == "U" or (
        values.dtype.kind == "O" and any(isinstance(v, str) for v in values)
    ):
        missing = np.array([is_missing(v) for v in values], bool)
        present = [v for v, gone in zip(values.tolist(), missing.tolist(), strict=True) if not gone]
        _check_words(present, column)
        labels = tuple(sorted(set(present)))
        place = {label: code for code, label in enumerate(labels)}
        codes = np.array([place.get(v, -1) for v in values.tolist()], np.int64)
    else:
        return None
    if missing.any():
        raise ValueError(
            f"column '{column}' has {int(missing.sum())} missing values, the first in row "
            f"{int(missing.argmax())}: drop these rows, or give them a level of their own, "
            f"frame['{column}'].fillna('missing')"
        )
    repeated, times = Counter(labels).most_common(1)[0]
    similar = (repeated, repeated) if times > 1 else look_alike(labels, "".join(labels))
    if similar:
        raise ValueError(
            f"levels {similar[0]!r} and {similar[1]!r} of column '{column}' differ only in case, "
            "spaces or Unicode form: make them one"
        )
    return codes, labels


def _check_words(present: list[Any], column: Any) -> None:
    for value in present:
        if not isinstance(value, str):
            raise TypeError(
                f"column '{column}' holds strings and {value!r}: make all of them numbers, or all "
                f"strings"
            )
    for value in dict.fromkeys(present):
        if is_number(value):
            raise ValueError(
                f"column '{column}' holds the number '{value}' as a string: convert it with "
                "pandas.to_numeric, or make the column a category if its values are names"
            )


def is_number(value: Any) -> bool:
    """Return whether a value, such as a text, stands for a finite number; "nan" is a word."""
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _recoded(
    codes: NDArray[np.int64], labels: tuple[str, ...], known: tuple[str, ...], column: Any
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return codes by levels that are known already."""
    place = {label: code for code, label in enumerate(known)}
    used = sorted(set(codes.tolist()))
    unknown = [labels[code] for code in used if labels[code] not in place]
    if unknown:
        row = int((codes == labels.index(unknown[0])).argmax())
        raise ValueError(
            f"column '{column}' has the level '{unknown[0]}' in row {row}, which is none of "
            f"{', '.join(known)}: leave its rows out, or fit data that have it"
        )
    table = np.array([place.get(label, -1) for label in labels], np.int64)
    return table[codes], known


def constant_by_client(name: str, values: Tensor, offsets: Tensor, names: Sequence[str]) -> Tensor:
    """Return the value that each client has in all its rows, (N, ...); rows are sorted."""
    first = values[offsets[:-1]]
    owner = torch.repeat_interleave(torch.arange(len(names)), offsets.diff())
    same = values == first[owner]
    if values.is_floating_point():
        same |= values.isnan() & first[owner].isnan()
    bad = (~same).flatten(1).any(1).nonzero() if values.dim() > 1 else (~same).nonzero()
    if len(bad):
        row = int(bad[0, 0])
        raise ValueError(
            f"client field '{name}' has the values {first[owner[row]].tolist()} and "
            f"{values[row].tolist()} in rows of client '{names[int(owner[row])]}': it must be "
            "constant within a client; a value per row is a field"
        )
    return first


def frame_of(data: Any, client: str) -> Any:
    """Return the rows of `ClientData` as a frame: a column a feature, codes as their levels."""
    import pandas as pd

    columns: dict[str, Any] = {client: np.array(data.names)[data.row_client.cpu().numpy()]}
    wide = {name: value[data.row_client] for name, value in data.client_fields.items()}
    for name, value in {**data.fields, **wide}.items():
        flat = value.cpu().numpy().reshape(len(value), -1)
        several = value.ndim > 1
        named = data.features.get(name, tuple(f"{name}[{j}]" for j in range(flat.shape[1])))
        for column, numbers in zip(named if several else (name,), flat.T, strict=True):
            levels = data.levels.get(f"{name}[{column}]" if several else name)
            columns[column] = np.array(levels)[numbers.astype(int)] if levels else numbers
    return pd.DataFrame(columns)
