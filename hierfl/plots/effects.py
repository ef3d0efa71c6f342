"""Plots of what a fitted formula says: effects, ranks of clients, funnels and survival curves."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from hierfl.plots.style import COLORS, GRAY, MARKERS, NAMED, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BANDS = 6  # most lines that have a band each; twice as many have a color and a dash each
PANELS = 12  # most clients that have a panel each


def new_axes(ax: Axes | None, *, lines: int = 0) -> Axes:
    """Return the axes, or those of a new figure with room for so many `lines` along the y axis."""
    if ax is not None:
        return ax
    from matplotlib import pyplot  # only here: it chooses a way to show figures

    size = (5.8, max(3.4, 0.5 + 0.2 * lines))
    made: Axes = pyplot.subplots(figsize=size, layout="constrained")[1]
    return made


def conditional_effect(
    ax: Axes, frame: pd.DataFrame, variable: str, *, by: str | None = None, label: str = ""
) -> Axes:
    """Draw a frame of `ConditionalEffects` over `variable`, for each value of `by`: bands, or points with intervals."""
    lines = _lines(frame, by)
    levels = None
    if frame[variable].dtype.kind not in "iuf":
        levels = list(dict.fromkeys(frame[variable]))
    for k, (name, values) in enumerate(lines):
        style = _line_style(k, name, len(lines))
        if levels is None:
            filled = len(lines) <= BANDS or "new client" in name
            _band(ax, values[variable].to_numpy(), values, style, filled=filled)
        else:
            x = np.array([levels.index(value) for value in values[variable]], dtype=float)
            x += 0.0 if len(lines) == 1 else 0.5 * (k / (len(lines) - 1) - 0.5)
            ax.vlines(x, values["low"], values["high"], color=style["color"], linewidth=1.2)
            style |= {"linestyle": "", "marker": MARKERS[(k + k // BANDS) % len(MARKERS)]}
            ax.plot(x, values["mean"].to_numpy(), markersize=5, **style)
    if levels is not None:
        ax.set_xticks(range(len(levels)), levels)
        ax.set_xlim(-0.6, len(levels) - 0.4)
    ax.set(xlabel=variable, ylabel=label)
    handles, names = ax.get_legend_handles_labels()
    if names and len(names) <= 2 * BANDS:
        # beside the axes, since bands may fill them
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        ax.legend(handles, names, frameon=False, fontsize=8, borderaxespad=0.3, **place)
    return plain(ax)


def _line_style(k: int, name: str, lines: int) -> dict[str, Any]:
    """Return color, dash and label of a line: many lines have one color and one entry of the legend."""
    if "new client" in name:
        return {"color": GRAY, "linestyle": "--", "label": name}
    if lines > 2 * BANDS:
        return {"color": COLORS[0], "linestyle": "-", "label": "a client" if k == 0 else None}
    dash = "-." if k >= BANDS else "-"
    return {"color": COLORS[k % len(COLORS)], "linestyle": dash, "label": name or None}


def client_panels(frame: pd.DataFrame, variable: str, by: str, label: str) -> Axes:
    """Draw a panel for each client, with a color for each value of `by`; return the first panel."""
    from matplotlib import pyplot  # only here: it chooses a way to show figures

    clients = list(dict.fromkeys(frame["client"]))
    across = min(3, len(clients))
    down = -(-len(clients) // across)
    figure, grid = pyplot.subplots(
        down,
        across,
        figsize=(0.8 + 2.3 * across, 0.6 + 2.1 * down),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for k, (ax, client) in enumerate(zip(grid.flat, clients, strict=False)):
        of_client = frame[frame["client"] == client].drop(columns="client")
        conditional_effect(ax, of_client, variable, by=by)
        ax.set_title("new client" if client == "new" else str(client), fontsize=9)
        ax.label_outer()
        if k + across >= len(clients):  # the lowest of its column, in a last row that is not full
            ax.tick_params(labelbottom=True)
            ax.set_xlabel(variable)
        if client != clients[across - 1] and ax.get_legend():
            ax.get_legend().remove()
    for ax in list(grid.flat)[len(clients) :]:
        ax.remove()
    figure.supylabel(label, fontsize="medium")
    first: Axes = grid[0, 0]
    return first


def _lines(frame: pd.DataFrame, by: str | None) -> list[tuple[str, pd.DataFrame]]:
    """Return the name and the rows of each line."""
    labels = [name for name in ("client", by, "level") if name is not None and name in frame]
    lines = []
    for values in product(*(list(dict.fromkeys(frame[name])) for name in labels)):
        rows = frame
        words = []
        for name, value in zip(labels, values, strict=True):
            rows = rows[rows[name] == value]
            if name == "client":
                words += ["new client" if value == "new" else str(value)] if value else []
            else:
                shown = f"{value:.3g}" if isinstance(value, float) else str(value)
                words.append(f"{name} {shown}" if name == by else shown)
        if len(rows):
            lines.append((", ".join(words), rows))
    return lines


def _band(
    ax: Axes, x: Any, part: pd.DataFrame, style: dict[str, Any], *, filled: bool = True
) -> None:
    """Draw a line, with its band where there is room for it."""
    if filled:
        low, high = part["low"].to_numpy(), part["high"].to_numpy()
        ax.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0.0, zorder=1)
    width = 0.8 if style["label"] in (None, "a client") else 1.6
    ax.plot(x, part["mean"].to_numpy(), linewidth=width, zorder=3, **style)


def client_ranks(ax: Axes, frame: pd.DataFrame, share: str) -> Axes:
    """Draw effects and mean ranks of a `Profile`, with intervals of a `share`, "90%"."""
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
    ax.set(xlabel="own effect, linear predictor", ylabel=f"client ({share} of its rank)")
    return plain(ax)


def funnel(ax: Axes, frame: pd.DataFrame, curves: pd.DataFrame) -> Axes:
    """Draw a `Profile`'s standardized ratios within `funnel_curves`, naming clients beyond the inner limits."""
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
    highest = float(max(frame["smr"].max(), curves["high"][curves["limits"] == "95%"].max()))
    ax.set(xlabel="expected events", ylabel="observed / expected", ylim=(0.0, 1.1 * highest))
    ax.legend(frameon=False, fontsize=8)
    return plain(ax)


def survival_steps(ax: Axes, frame: pd.DataFrame) -> Axes:
    """Draw a frame of Kaplan-Meier curves as steps, with bands, a color for each group."""
    groups = list(frame.groupby("group", sort=False))
    for k, (name, rows) in enumerate(groups):
        color, dashes = COLORS[k % len(COLORS)], "-." if k >= len(COLORS) else "-"
        time, *lines = (
            np.concatenate([[first], rows[of]])
            for of, first in (("time", 0.0), ("survival", 1.0), ("low", 1.0), ("high", 1.0))
        )
        ax.step(time, lines[0], where="post", color=color, linestyle=dashes, label=name or None)
        if len(groups) <= BANDS:
            ax.fill_between(time, lines[1], lines[2], step="post", color=color, alpha=0.18, lw=0)
    if len(groups) > 1:
        ax.legend(frameon=False)
    ax.set(ylabel="share beyond", ylim=(0.0, 1.02), xlim=(0.0, None))
    return plain(ax)


def hazard_ratio_course(ax: Axes, time: Any, values: Any, name: str) -> Axes:
    """Draw scaled residuals of a column over time, with their mean, and means of tenths with 90% intervals."""
    time, values = np.asarray(time), np.asarray(values)
    ax.plot(time, values, "o", color=GRAY, markersize=2.5, alpha=0.6)
    ax.axhline(0.0, color=GRAY, linewidth=0.8, linestyle=":", zorder=0)
    ax.axhline(values.mean(), color=COLORS[0], linewidth=0.8, linestyle="--", zorder=0)
    tenths = np.array_split(np.argsort(time, kind="stable"), min(10, max(1, len(time) // 10)))
    at = np.array([np.median(time[rows]) for rows in tenths])
    mean = np.array([values[rows].mean() for rows in tenths])
    wide = np.array([1.645 * values[rows].std(ddof=1) / len(rows) ** 0.5 for rows in tenths])
    ax.vlines(at, mean - wide, mean + wide, color=COLORS[0], linewidth=1.4, zorder=3)
    ax.plot(at, mean, "o-", color=COLORS[0], markersize=5, linewidth=1.0, zorder=3)
    ax.set(xlabel="time", ylabel=f"log hazard ratio of {name}")
    low, high = np.quantile(values, [0.02, 0.98])  # without the tails
    low, high = min(low, (mean - wide).min()), max(high, (mean + wide).max())
    ax.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    return plain(ax)
