"""Plots of profiles of clients: effects in the order of their ranks, and funnels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from hierfl.plots.clients import NAMED
from hierfl.plots.style import COLORS, GRAY, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def client_ranks(ax: Axes, frame: pd.DataFrame) -> Axes:
    """Draw effects and mean ranks of a `Profile`, with 90 % intervals."""
    some = frame.sort_values("rank", ignore_index=True)
    at = np.arange(len(some), dtype=float)
    ax.hlines(at, some["effect_low"], some["effect_high"], color=COLORS[0], linewidth=1.2)
    ax.plot(some["effect"], at, "o", color=COLORS[0], markersize=4.5)
    ax.axvline(0.0, color=GRAY, linewidth=0.8, linestyle=":", zorder=0)
    if len(some) <= NAMED:
        names = [f"{row.client}  ({row.rank_low} to {row.rank_high})" for row in some.itertuples()]
        ax.set_yticks(at, names)
        ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(some) - 0.4, -0.6)
    ax.set(xlabel="own effect, linear predictor", ylabel="client (90 % interval of its rank)")
    return plain(ax)


def funnel(ax: Axes, frame: pd.DataFrame, curves: pd.DataFrame) -> Axes:
    """Draw a `Profile`'s standardized ratios over expected events, within limits of sampling alone.

    The limits are those of `funnel_curves`. Clients beyond the inner limits are named.
    """
    styles = ("--", "-")
    for style, (name, part) in zip(styles, curves.groupby("limits", sort=False), strict=True):
        for side in ("low", "high"):
            label = f"{name} limits" if side == "low" else None
            how: dict[str, Any] = {"color": GRAY, "linewidth": 0.9, "label": label, "zorder": 1}
            ax.plot(part["expected"], part[side], style, **how)
    ax.axhline(1.0, color=GRAY, linewidth=0.8, linestyle=":", zorder=0)
    ax.plot(frame["expected"], frame["smr"], "o", color=COLORS[0], markersize=5, zorder=3)
    for row in frame.itertuples():
        if row.funnel != "inside":
            at = (float(row.expected), float(row.smr))
            shift: dict[str, Any] = {"xytext": (5, 3), "textcoords": "offset points"}
            ax.annotate(str(row.client), at, fontsize=8, **shift)
    highest = float(max(frame["smr"].max(), curves["high"][curves["limits"] == "95 %"].max()))
    ax.set(xlabel="expected events", ylabel="observed / expected", ylim=(0.0, 1.1 * highest))
    ax.legend(frameon=False, fontsize=8)
    return plain(ax)
