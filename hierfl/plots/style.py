"""Colors (Okabe and Ito's, the first four told apart by all kinds of color vision) and markers of plots."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#0072B2", "#E69F00", "#009E73", "#000000", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
BAND, GRAY = "0.88", "0.45"
NAMED = 40  # most clients that get a line and a name each
POINTS: dict[str, Any] = {"color": COLORS[0], "edgecolor": "white"}  # of a scatter plot


def arrays(**values: tuple[ArrayLike, tuple[str | int, ...]]) -> list[NDArray[np.float64]]:
    """Return arrays of numbers, each given with its sizes: numbers, or letters that are one number each.

    Raises:
        ValueError: an array has other sizes, or is empty.
    """
    letters: dict[str, int] = {}
    made = []
    for name, (value, sizes) in values.items():
        array = np.asarray(value, dtype=float)
        fits = array.ndim == len(sizes) and array.size > 0
        for size, there in zip(sizes, array.shape, strict=False):
            expected = size if isinstance(size, int) else letters.setdefault(size, there)
            fits = fits and there == expected
        if not fits:
            shape = ", ".join(map(str, sizes)) + "," * (len(sizes) == 1)
            numbers = ", ".join(f"{letter} = {number}" for letter, number in letters.items())
            raise ValueError(
                f"{name} has shape {array.shape}: it must be ({shape}), where {numbers}"
            )
        made.append(array)
    return made


def plain(ax: "Axes") -> "Axes":
    """Hide the upper and right side of the frame and return the axes."""
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def mark_areas(rows: NDArray[np.float64], *, largest: float) -> NDArray[np.float64]:
    """Return areas of marks proportional to `rows`: `largest` at most, 6 at least to be visible."""
    areas: NDArray[np.float64] = np.maximum(largest * rows / rows.max(), 6.0)
    return areas
