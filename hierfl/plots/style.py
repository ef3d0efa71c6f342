"""The colours and markers of every picture.

Colours are of Okabe and Ito's palette, the first four those that all kinds of colour vision tell apart; markers differ too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#000000", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
BAND, GREY = "0.88", "0.45"


def plain(ax: Axes) -> Axes:
    """Without the frame's upper and right side."""
    ax.spines[["top", "right"]].set_visible(False)
    return ax
