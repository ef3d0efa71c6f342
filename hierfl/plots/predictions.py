"""Predictions beside what came true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hierfl.diagnostics.calibration import equal_mass
from hierfl.plots.style import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def reliability(
    ax: Axes,
    predicted: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    bins: int = 8,
    prob: float = 0.9,
    colours: Sequence[str] = COLOURS,
) -> Axes:
    """How often the label is 1 among rows of like predicted probability: on the diagonal, predictions are calibrated.

    Bins hold equal numbers of rows (one more or less). A point stands at its bin's mean prediction and share of ones; its
    interval is Jeffreys' for that share (Brown, Cai and DasGupta 2001), and says how far chance alone would take it.

    Args:
        ax: to draw on.
        predicted: name -> (probabilities (n,), labels 0/1 (n,)).
        bins: how many; never so many that one has less than 2 rows.
        prob: of the intervals.
        colours: one a name.

    Raises:
        ValueError: probabilities and labels of different lengths, or no rows.
    """
    ax.plot([0.0, 1.0], [0.0, 1.0], color="0.6", linewidth=1.0, zorder=1)
    shifts = np.linspace(-0.006, 0.006, len(predicted)) if len(predicted) > 1 else np.zeros(1)
    for k, (name, (p, y)) in enumerate(predicted.items()):
        mean, share, low, high = equal_mass(p, y, bins=bins, prob=prob)
        style: dict[str, Any] = {"color": colours[k % len(colours)], "marker": MARKERS[k % len(MARKERS)], "zorder": 3}
        bars = [share - low, high - share]
        ax.errorbar(mean + shifts[k], share, yerr=bars, label=name, linewidth=1.0, markersize=4.5, elinewidth=1.0, **style)
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    ax.set_xticks([0.0, 0.25, 0.5, 0.75, 1.0])
    ax.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0])
    ax.spines[["top", "right"]].set_visible(False)
    return ax
