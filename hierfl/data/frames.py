"""Fields from the columns of a pandas frame; strings and categories become level codes."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hierfl.data.arrays import Array, as_tensor
from hierfl.data.consistency import SPELLING, check_has, is_column, look_alike
from hierfl.data.grouping import sort_by_client

Columns = str | Sequence[str]
Levels = Mapping[str, Sequence[str]]


@dataclass(frozen=True, eq=False)
class FrameRows:
    """Rows' positions `place` (n,) in their frames, all frame labels `index`, and who has a label, `labeled`."""

    place: Tensor
    index: Any
    labeled: Tensor | None = None

    def kept(self, rows: Tensor) -> "FrameRows":
        """Return some of the rows."""
        labeled = None if self.labeled is None else self.labeled[rows]
        return replace(self, place=self.place[rows], labeled=labeled)

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it as tensors, to be saved with the rows; labels that are no numbers are texts."""
        plain = range(len(self.index)) if self.index.nlevels > 1 else self.index.tolist()
        text = json.dumps(list(plain), default=str)
        saved = {"frame.index": torch.tensor(list(text.encode())).byte(), "frame.place": self.place}
        return saved if self.labeled is None else {**saved, "frame.labeled": self.labeled}

    @staticmethod
    def of_tensors(saved: Mapping[str, Tensor]) -> "FrameRows":
        """Read what `tensors` returned."""
        labels, place = json.loads(bytes(saved["index"].tolist())), saved["place"]
        if place.dtype != torch.int64 or not set(place.tolist()) <= set(range(len(labels))):
            raise ValueError("the rows' positions are not in their frame")
        import pandas as pd  # slow to import

        return FrameRows(place, pd.Index(labels), saved.get("labeled"))

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
        blank = torch.full(shape, torch.nan) if not whole else torch.empty(shape, dtype=dtype)
        return blank.to(dtype).index_copy(dim, self.place, values.to(dtype))


def parts_of_frame(
    frame: Any,
    client: str,
    fields: Mapping[str, Columns],
    client_fields: Mapping[str, Columns],
    levels: Levels,
) -> dict[str, Any]:
    """Return the parts of the `ClientData` of a frame, as in `ClientData.from_frame`."""
    check_has(frame, client)
    if not fields:  # every column is a field of its own name
        read = {client, *client_fields, *chain(*map(_listed, client_fields.values()))}
        fields = {str(column): column for column in frame.columns if column not in read}
    if twice := client_fields.keys() & fields.keys():
        raise ValueError(f"'{min(twice)}' is both a field and a client field: rename one of them")
    reader = FrameReader(frame, levels)
    values = {name: reader.field(name, of) for name, of in {**fields, **client_fields}.items()}
    rows = sort_by_client(frame[client], None, values)
    own = {
        name: constant_by_client(name, rows.fields.pop(name), rows.offsets, rows.names)
        for name in client_fields
    }
    features = {name: of for name, of in reader.features.items() if name not in own}
    return {**rows._asdict(), "client_fields": own, "features": features, "levels": reader.levels}


def _listed(columns: Columns) -> Sequence[str]:
    return [columns] if isinstance(columns, str) else columns


class FrameReader:
    """Reads fields from the columns of a frame, and keeps their `features` and `levels`."""

    def __init__(self, frame: Any, coded: Levels) -> None:
        """Read from a frame; of fields in `coded` the levels are known before."""
        self.frame, self.coded = frame, coded
        self.features: dict[str, tuple[str, ...]] = {}
        self.levels: dict[str, tuple[str, ...]] = {}

    def field(self, name: str, columns: Any) -> Array:
        """Return the values of a field of one column, (n,), or of a list of columns, (n, columns)."""
        if not isinstance(columns, list | tuple) or is_column(self.frame, columns):
            return self._column(columns, name)
        if not columns:
            raise ValueError(f"field '{name}' is given an empty list of columns: name at least one")
        keys = [f"{name}[{column}]" for column in columns]
        read = [as_tensor(self._column(*of), of[1]) for of in zip(columns, keys, strict=True)]
        for column, key in zip(columns, keys, strict=True):
            if (many := len(self.levels.get(key, ()))) > 2:
                what = f"column '{column}' of field '{name}' has {many} levels, and their codes are not quantities"
                fix = "read it as a field of its own, or as 0/1 columns (pandas.get_dummies)"
                raise ValueError(f"{what}: {fix}")
        self.features[name] = tuple(map(str, columns))
        dtype = reduce(torch.promote_types, (column.dtype for column in read))
        return torch.stack([column.to(dtype) for column in read], dim=1)

    def _column(self, column: Any, key: str) -> Array:
        """Return a column's numbers, or the codes of its levels."""
        check_has(self.frame, column)
        series = self.frame[column]
        labels = _labels_of(series, column)
        if labels is None:
            if key in self.coded:
                what = f"column '{column}' holds no strings, but levels are given for '{key}'"
                raise ValueError(f"{what}: drop them")
            return series.to_numpy()
        missing = series.isna().to_numpy(dtype=bool)
        if missing.any():
            what = f"column '{column}' is missing {int(missing.sum())} of {len(missing)} values, the first in row"
            fix = "drop these rows, or give them a level of their own, "
            fix += f"frame['{column}'].fillna('missing')"
            raise ValueError(f"{what} {int(missing.argmax())}: {fix}")
        self.levels[key] = tuple(map(str, self.coded.get(key, labels)))
        place = {label: code for code, label in enumerate(self.levels[key])}
        codes = np.array([place.get(str(value), -1) for value in series.tolist()], np.int64)
        if (codes < 0).any():
            row = int((codes < 0).argmax())
            what = f"column '{column}' has the level '{series.iloc[row]}' in row {row}, which is not one of"
            fix = "leave its rows out, or fit data that have it"
            raise ValueError(f"{what} {', '.join(place)}: {fix}")
        return codes


def _labels_of(series: Any, column: Any) -> tuple[str, ...] | None:
    """Return the levels of a column of strings or categories; None of numbers, also as categories."""
    if hasattr(series, "cat") and hasattr(series.cat, "categories"):
        if series.cat.categories.dtype.kind in "iufb":
            return None
        labels = tuple(map(str, series.cat.categories))
    else:
        present = series[~series.isna()].tolist() if series.dtype.kind not in "iufbcMm" else []
        if not any(isinstance(v, str) for v in present):
            return None
        if other := [v for v in present if not isinstance(v, str)]:
            fix = "make all of them numbers, or all strings"
            raise TypeError(f"column '{column}' holds strings and {other[0]!r}: {fix}")
        labels = tuple(sorted(set(present)))
        if digits := next(filter(is_number, dict.fromkeys(present)), None):
            fix = "convert it with pandas.to_numeric, or make the column a category if its values are names"
            raise ValueError(f"column '{column}' holds the number '{digits}' as a string: {fix}")
    repeated, times = Counter(labels).most_common(1)[0] if labels else ("", 0)
    similar = (repeated, repeated) if times > 1 else look_alike(labels)
    if similar:
        what = f"levels {similar[0]!r} and {similar[1]!r} of column '{column}' differ only in"
        raise ValueError(f"{what} {SPELLING}: make them the same")
    return labels


def is_number(value: Any) -> bool:
    """Return whether a value, such as a text, stands for a finite number; "nan" is a word."""
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


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
        pair = f"{first[owner[row]].tolist()} and {values[row].tolist()}"
        what = f"has the values {pair} in rows of client '{names[int(owner[row])]}'"
        fix = "it must be constant within a client; a value per row is a field"
        raise ValueError(f"client field '{name}' {what}: {fix}")
    return first


def frame_of(data: Any, client: str) -> Any:
    """Return the rows of `ClientData` as a frame: a column a feature, codes as their levels."""
    import pandas as pd

    columns: dict[str, Any] = {client: np.array(data.names)[data.row_client.cpu().numpy()]}
    wide = {name: value[data.row_client] for name, value in data.client_fields.items()}
    for name, value in {**data.fields, **wide}.items():
        flat = value.cpu().numpy().reshape(len(value), -1)
        several = value.ndim > 1
        labels = data.features.get(name, tuple(f"{name}[{j}]" for j in range(flat.shape[1])))
        for column, numbers in zip(labels if several else (name,), flat.T, strict=True):
            levels = data.levels.get(f"{name}[{column}]" if several else name)
            columns[column] = np.array(levels)[numbers.astype(int)] if levels else numbers
    return pd.DataFrame(columns)
