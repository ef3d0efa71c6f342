"""Colors (Okabe and Ito's, the first four told apart by all kinds of color vision) and markers of plots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#0072B2", "#E69F00", "#009E73", "#000000", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
BAND, GRAY = "0.88", "0.45"
NAMED = 40  # most clients that get a line and a name each
POINTS: dict[str, Any] = {"color": COLORS[0], "edgecolor": "white"}  # of a scatter plot


def plain(ax: Axes) -> Axes:
    """Hide the upper and right side of the frame and return the axes."""
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def mark_areas(rows: NDArray[np.float64], *, largest: float) -> NDArray[np.float64]:
    """Return areas of marks proportional to `rows`: `largest` at most, 6 at least to be visible."""
    areas: NDArray[np.float64] = np.maximum(largest * rows / rows.max(), 6.0)
    return areas
