"""Plots of the ranks of simulation-based calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats

from hierfl.plots.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hierfl.diagnostics.sbc import Sbc


def rank_ecdf(ax: Axes, result: Sbc, site: str, *, prob: float = 0.95) -> Axes:
    """Draw the ECDF of a site's ranks minus the uniform CDF, over a simultaneous band.

    A line above the band on the left and below it on the right shows a guide that is too narrow. A
    single hill or valley shows a guide that is shifted to one side.

    Args:
        ax: axes to draw on.
        result: result of `hierfl.diagnostics.sbc`.
        site: name of a global or local site; another name is a KeyError.
        prob: probability with which one whole line lies in the band, if its ranks are uniform.
    """
    frame = result.ecdf(site, prob=prob)
    at = frame.index.to_numpy()
    style: dict[str, Any] = {"color": "0.87", "linewidth": 0.0, "step": "mid"}
    ax.fill_between(at, frame.low - at, frame.high - at, label=f"{prob:.0%} band", **style)
    _rank_lines(ax, frame, site)
    ax.axhline(0.0, color="0.4", linewidth=0.7, linestyle=":")
    ax.set_xlim(0.0, 1.0)
    ax.set_xlabel("fractional rank of the true value")
    ax.set_ylabel("ECDF minus uniform CDF")
    return _titled(ax, site)


def _rank_lines(ax: Axes, frame: pd.DataFrame, site: str) -> None:
    """Draw one line per scalar; if there are more scalars than colors, all in one color."""
    at = frame.index.to_numpy()
    names = [name for name in frame.columns if name not in ("low", "high")]
    many = len(names) > len(COLORS)
    for k, name in enumerate(names):
        label = f"{site}{name}" if name.startswith("[") else name or site
        if many:
            label = f"{len(names)} scalars" if k == 0 else None
        width, alpha = (0.8, 0.6) if many else (1.4, 1.0)
        style: dict[str, Any] = {"color": COLORS[0 if many else k], "linewidth": width}
        ax.plot(at, frame[name] - at, alpha=alpha, label=label, **style)


def rank_histogram(ax: Axes, result: Sbc, site: str, *, bins: int = 20, prob: float = 0.95) -> Axes:
    """Draw a histogram of a site's ranks over the range expected of uniform ranks.

    The ranks of all scalars and all clients of the site are pooled.

    Args:
        ax: axes to draw on.
        result: result of `hierfl.diagnostics.sbc`.
        site: name of a global or local site; another name is a KeyError.
        bins: number of bins over the ranks 0 to `result.draws`.
        prob: probability of the range for a single bin, assuming independent ranks. Ranks of
            several scalars of one data set are not quite independent.
    """
    if site not in {**result.shared, **result.own}:
        raise KeyError(
            f"there is no site '{site}': the sites are {', '.join([*result.shared, *result.own])}"
        )
    ranks = {**result.shared, **result.own}[site].flatten()
    edges = np.linspace(0, result.draws + 1, bins + 1)
    ax.hist(ranks, bins=list(edges), color=COLORS[0], alpha=0.75, edgecolor="white", linewidth=0.5)
    low, high = stats.binom.interval(prob, len(ranks), 1.0 / bins)
    ax.axhspan(
        low, high, color="0.87", linewidth=0.0, zorder=0, label=f"{prob:.0%} range if uniform"
    )
    ax.set_xlabel(f"rank of the true value among {result.draws} draws")
    ax.set_ylabel("replications" if len(ranks) == result.replications else "ranks")
    return _titled(ax, site)


def _titled(ax: Axes, site: str) -> Axes:
    ax.set_title(site, fontsize=9, loc="left")
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
    place |= {"ncols": 3, "borderaxespad": 0.1, "columnspacing": 1.0}
    ax.legend(frameon=False, fontsize=7, **place)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
