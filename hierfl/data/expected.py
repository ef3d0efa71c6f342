"""The check that a user's rows are `ClientData`, with the constructor that makes them so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch

from hierfl.data.clients import ClientData
from hierfl.data.frames import FrameRows

_ARRAYS = "ClientData.from_arrays(client_id, x=..., y=...)"
FRAME = "ClientData.from_frame(frame, 'client', x=[...], y=...)"
# a frame for each client: name -> frame
_FRAMES = (
    "ClientData.from_frame(pandas.concat({}, names=['client']).reset_index('client'), 'client', "
    "x=[...], y=...)"
)
# what holds rows already -> where
_HELD = {
    "Fit": "take the rows that were fitted, fit.federation.data",
    "Prediction": "take the rows that were predicted, prediction.data",
    "ClientBatch": "take the ClientData that the batch is of",
}


def expect_client_data(value: Any, what: str) -> ClientData:
    """Return `value`, which must be `ClientData`; the error names the constructor that takes it."""
    if isinstance(value, ClientData):
        return value
    kind, fix = _kind_and_fix(value)
    raise TypeError(f"{what} is a {kind}, not ClientData: {fix}")


def is_frame(value: Any) -> bool:
    """Return whether a value is a pandas frame; pandas is slow to import."""
    return any(kind.__name__ == "DataFrame" for kind in type(value).__mro__)


def read_frame(rows: Any, clients: str, like: ClientData | None = None) -> Any:
    """Return a frame's rows, each column a field, or those that `like` has, coded equally; others as they are."""
    if not is_frame(rows):
        return rows
    read = rows if like is None else rows[[c for c in rows if c in like.fields or c == clients]]
    data = ClientData.from_frame(read, clients, levels=None if like is None else like.levels)
    place = ClientData.from_arrays(rows[clients], place=torch.arange(len(rows))).fields["place"]
    return replace(data, frame_rows=FrameRows(place, rows.index, clients=clients))


def as_frame(value: Any) -> str:
    """Return how rows of another kind become a pandas frame, after a colon; "" if unknown."""
    if hasattr(value, "to_pandas"):
        return ": convert it, .to_pandas()"
    if isinstance(value, str | PathLike):
        return ": read it, pandas.read_csv(path)"
    return ": make it one, pandas.DataFrame(columns)" if isinstance(value, Mapping) else ""


def _kind_and_fix(value: Any) -> tuple[str, str]:
    kind = type(value).__name__
    if is_frame(value):
        return kind, f"make it with {FRAME}, or name the column, hierfl.fit(..., clients='client')"
    if hasattr(value, "to_pandas"):  # polars, pyarrow
        return kind, f"convert it, frame.to_pandas(), and make it with {FRAME}"
    if kind in _HELD:
        return kind, _HELD[kind]
    if isinstance(value, str | PathLike):
        read = FRAME.replace("frame,", "pandas.read_csv(path),")
        return f"{kind}, '{value}'", f"read the file and make it with {read}"
    each = list(value.values() if isinstance(value, Mapping) else ())
    each = list(value) if isinstance(value, Sequence) else each
    if each and all(map(is_frame, each)):
        frames = "frames" if isinstance(value, Mapping) else "dict(zip(names, frames))"
        return f"{kind} of DataFrames", f"make it with {_FRAMES.format(frames)}"
    if isinstance(value, Mapping):
        made = "ClientData.from_clients(...), or from_arrays(client_id, x=..., y=...)"
        return kind, f"make it with {made}"
    if each and all(isinstance(one, ClientData) for one in each):
        fix = "take one of them, as in train, test = data.split(0.8, seed=0)"
        return f"{kind} of {len(each)} ClientData", fix
    return kind, f"make it with {_ARRAYS}"
