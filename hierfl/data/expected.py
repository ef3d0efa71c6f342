"""The check that a user's rows are `ClientData`, with the constructor that makes them so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hierfl.data.clients import ClientData
from hierfl.data.frames import FrameRows

MAKE = (
    "make it with ClientData.from_frame(frame, 'client', x=[...], y=...), from_clients({name: {'y': "
    "...}}) or from_arrays(client_id, y=...), or name the column, hierfl.fit(..., clients='client')"
)


def expect_client_data(value: Any, what: str) -> ClientData:
    """Return `value`, which must be `ClientData`; the error names the constructors."""
    if isinstance(value, ClientData):
        return value
    raise TypeError(f"{what} is a {type(value).__name__}, not ClientData: {MAKE}")


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
    return replace(data, frame_rows=FrameRows(place, rows.index), client_column=clients)
