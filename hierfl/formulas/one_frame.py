"""Clients' rows in one frame, in which clients follow each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd


class OneFrame(Mapping[str, Any]):
    """Client -> its rows: a slice of one frame, made when it is read, since 10,000 take seconds."""

    def __init__(self, whole: pd.DataFrame, counts: Mapping[str, int]) -> None:
        """Read the sorted rows of clients, so many each."""
        self.whole, self.names = whole, tuple(counts)
        ends = pairwise([0, *np.cumsum([*counts.values()]).tolist()])
        self.rows = {name: slice(*of) for name, of in zip(self.names, ends, strict=True)}

    def __getitem__(self, name: str) -> pd.DataFrame:
        """Return the rows of a client."""
        return self.whole.iloc[self.rows[name]]

    def __iter__(self) -> Iterator[str]:
        """Go over the names of the clients."""
        return iter(self.names)

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.names)


def joined(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return all clients' rows, one client after another."""
    import pandas as pd  # slow to import

    if isinstance(frames, OneFrame):
        return frames.whole
    return pd.concat(frames.values()) if len(frames) > 1 else next(iter(frames.values()))


def ends_of(frames: Mapping[str, pd.DataFrame]) -> NDArray[np.int64]:
    """Return where each client's rows end among all of them, (N,)."""
    if isinstance(frames, OneFrame):
        return np.array([rows.stop for rows in frames.rows.values()], dtype=np.int64)
    return np.cumsum([*map(len, frames.values())])
