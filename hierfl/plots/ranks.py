"""Pictures of simulation-based calibration: each function draws on Matplotlib's Axes and returns them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import stats

from hierfl.plots.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hierfl.diagnostics.sbc import Sbc


def rank_ecdf(ax: Axes, found: Sbc, site: str, *, prob: float = 0.95) -> Axes:
    """ECDF of a site's ranks less that of uniform ones, a line a number, over the band in which all of a line lies with `prob`.

    Above the band on the left and below it on the right: the guide is too narrow. A hill or a valley: it is off to one side.

    Args:
        ax: to draw on.
        found: what `sbc` gave.
        site: global or local.
        prob: of the band, for one line.

    Raises:
        KeyError: there is no such site.
    """
    frame = found.ecdf(site, prob=prob)
    at = frame.index.to_numpy()
    ax.fill_between(
        at,
        frame.low - at,
        frame.high - at,
        color="0.87",
        linewidth=0.0,
        step="mid",
        label=f"{prob:.0%} band",
    )
    _rank_lines(ax, frame, site)
    ax.axhline(0.0, color="0.4", linewidth=0.7, linestyle=":")
    ax.set_xlim(0.0, 1.0)
    ax.set_xlabel("fractional rank of the truth")
    ax.set_ylabel("ECDF less the uniform one")
    return _titled(ax, site)


def _rank_lines(ax: Axes, frame: pd.DataFrame, site: str) -> None:
    at = frame.index.to_numpy()
    names = [name for name in frame.columns if name not in ("low", "high")]
    many = len(names) > len(COLOURS)
    for k, name in enumerate(names):
        label = (
            (f"{len(names)} numbers" if k == 0 else None)
            if many
            else f"{site}{name}"
            if name.startswith("[")
            else name or site
        )
        ax.plot(
            at,
            frame[name] - at,
            color=COLOURS[0 if many else k],
            linewidth=0.8 if many else 1.4,
            alpha=0.6 if many else 1.0,
            label=label,
        )


def rank_histogram(ax: Axes, found: Sbc, site: str, *, bins: int = 20, prob: float = 0.95) -> Axes:
    """Ranks of a site, those of its numbers and clients together, over the range that one bin of uniform ranks has with `prob`.

    Args:
        ax: to draw on.
        found: what `sbc` gave.
        site: global or local.
        bins: that divide the ranks, 0 to `found.draws`.
        prob: of the range of a single bin, for independent ranks: those of one data set's numbers are not quite.

    Raises:
        KeyError: there is no such site.
    """
    if site not in {**found.shared, **found.own}:
        raise KeyError(
            f"there is no site '{site}'; there are {', '.join([*found.shared, *found.own])}"
        )
    ranks = {**found.shared, **found.own}[site].flatten()
    edges = np.linspace(0, found.draws + 1, bins + 1)
    ax.hist(ranks, bins=list(edges), color=COLOURS[0], alpha=0.75, edgecolor="white", linewidth=0.5)
    low, high = stats.binom.interval(prob, len(ranks), 1.0 / bins)
    ax.axhspan(
        low, high, color="0.87", linewidth=0.0, zorder=0, label=f"{prob:.0%} of uniform ranks"
    )
    ax.set_xlabel(f"rank of the truth among {found.draws} draws")
    ax.set_ylabel("replications" if len(ranks) == found.replications else "numbers")
    return _titled(ax, site)


def _titled(ax: Axes, site: str) -> Axes:
    """The site's name above the axes on the left, the legend on the right."""
    ax.set_title(site, fontsize=9, loc="left")
    ax.legend(
        frameon=False,
        fontsize=7,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.1,
        ncols=3,
        columnspacing=1.0,
    )
    ax.spines[["top", "right"]].set_visible(False)
    return ax
