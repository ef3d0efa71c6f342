"""The check that a user's rows are `ClientData`, with the constructor that makes them so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import torch

from hierfl.data.clients import ClientData
from hierfl.data.frames import FrameRows

_ARRAYS = "ClientData.from_arrays(client_id, x=..., y=...)"
FRAME = "ClientData.from_frame(frame, 'client', x=[...], y=...)"
# of {name: frame}
_FRAMES = (
    "ClientData.from_frame(pandas.concat(frames, names=['client']).reset_index('client'), 'client', "
    "x=[...], y=...)"
)


def expect_client_data(value: Any, what: str) -> ClientData:
    """Return `value`, which must be `ClientData`; the error names the constructor that takes it."""
    if isinstance(value, ClientData):
        return value
    raise TypeError(f"{what} is a {type(value).__name__}, not ClientData: {_fix(value)}")


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
    """Return how rows of another kind become a pandas frame; "" of one, and where it is unknown."""
    if hasattr(value, "to_pandas"):  # polars, pyarrow
        return "convert it, .to_pandas()"
    if isinstance(value, str | PathLike):
        return "read it, pandas.read_csv(path)"
    is_columns = isinstance(value, Mapping) and not all(map(is_frame, value.values()))
    return "make it one, pandas.DataFrame(columns)" if is_columns else ""


def _fix(value: Any) -> str:
    if is_frame(value):
        return f"make it with {FRAME}, or name the column, hierfl.fit(..., clients='client')"
    if isinstance(value, Mapping):
        is_frames = value and all(map(is_frame, value.values()))
        clients = "ClientData.from_clients(...), or from_arrays(client_id, x=..., y=...)"
        return f"make it with {_FRAMES if is_frames else clients}"
    advice = as_frame(value)
    return f"{advice}, and make it with {FRAME}" if advice else f"make it with {_ARRAYS}"
