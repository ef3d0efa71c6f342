"""Predictions beside what came true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta

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


def equal_mass(p: ArrayLike, y: ArrayLike, *, bins: int = 8, prob: float = 0.9) -> tuple[NDArray[np.float64], ...]:
    """Rows in the order of their predicted probability, cut into bins of equal numbers.

    Args:
        p: (n,) probabilities.
        y: (n,) labels 0/1.
        bins: how many; fewer where there are less than 2 rows a bin.
        prob: of the interval of each share.

    Returns:
        Mean probability, share of ones, lower and upper end of its interval, each (bins,).

    Raises:
        ValueError: probabilities and labels of different lengths, or no rows.

    >>> [v.round(2).tolist() for v in equal_mass([0.1, 0.3, 0.7, 0.9], [0, 0, 1, 1], bins=2)[:2]]
    [[0.2, 0.8], [0.0, 1.0]]
    """
    p, y = np.asarray(p, dtype=float), np.asarray(y, dtype=float)
    if p.shape != y.shape or p.ndim != 1 or not len(p):
        raise ValueError(f"probabilities and labels have the shapes {p.shape} and {y.shape}: both must be (n,), n > 0")
    parts = np.array_split(np.argsort(p, kind="stable"), max(1, min(bins, len(p) // 2)))
    rows, ones = np.array([len(part) for part in parts]), np.array([y[part].sum() for part in parts])
    tail, share = (1.0 - prob) / 2.0, ones / rows
    low = np.where(ones > 0, beta.ppf(tail, ones + 0.5, rows - ones + 0.5), 0.0)
    high = np.where(ones < rows, beta.ppf(1.0 - tail, ones + 0.5, rows - ones + 0.5), 1.0)
    # far out, Jeffreys' interval may leave the share itself out: an error bar cannot be negative
    return np.array([p[part].mean() for part in parts]), share, np.minimum(low, share), np.maximum(high, share)
