"""Plots of the progress of a run, its messages, k-hats, and the ranks of simulation-based calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap, LogNorm

from hierfl.core.importance_sampling import K_HAT
from hierfl.plots.style import BAND, COLORS, GRAY, MARKERS, NAMED, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hierfl.diagnostics.sbc import Sbc
    from hierfl.diagnostics.sensitivity import Sensitivity

Histories: TypeAlias = "pd.DataFrame | Sequence[pd.DataFrame]"


def convergence(
    ax: Axes,
    histories: Histories | Mapping[str, Histories],
    *,
    column: str = "elbo",
    prob: float = 0.9,
    settled: float = 0.5,
) -> Axes:
    """Draw one column of the history by round: the median over seeds and a band around it.

    With up to nine seeds the band reaches from the lowest to the highest value; with ten or more it
    is the central interval of probability `prob`.

    Args:
        ax: axes to draw on.
        histories: `Fit.history` of one fit, or a sequence with one history per seed; or a mapping
            from the name of a method to either, one color each.
        column: name of the column; rounds without a value are left out.
        prob: probability of the band, with ten seeds or more.
        settled: the y axis shows all values from this share of the rounds on. Values of earlier
            rounds that lie far below or above them are cut off and marked by an arrow. 0: all
            values are shown.

    Raises:
        ValueError: a history has no such column.
    """
    by_name = histories if isinstance(histories, Mapping) else {column: histories}
    late, whole = [], []
    for k, (name, of_seeds) in enumerate(by_name.items()):
        tables = [of_seeds] if isinstance(of_seeds, pd.DataFrame) else list(of_seeds)
        table = _by_round(tables, column)
        middle = table.median(axis=1)
        many = table.shape[1] >= 10
        low, high = (
            table.quantile(0.5 + s * prob / 2, axis=1) if many else end
            for s, end in ((-1, table.min(axis=1)), (1, table.max(axis=1)))
        )
        style: dict[str, Any] = {"color": COLORS[k % len(COLORS)], "linewidth": 1.4}
        if len(table) <= 30:
            style |= {"marker": MARKERS[k % len(MARKERS)], "markersize": 3.0}
        ax.plot(table.index, middle, label=name, **style)
        if table.shape[1] > 1:
            ax.fill_between(table.index, low, high, color=style["color"], alpha=0.2, linewidth=0.0)
        at = int(settled * len(table))
        late += [low.iloc[at:].min(), high.iloc[at:].max()]
        whole += [low.min(), high.max()]
    _set_limits(ax, (min(late), max(late)), (min(whole), max(whole)))
    ax.set(xlabel="round", ylabel=column)
    return plain(ax)


def _by_round(histories: list[pd.DataFrame], column: str) -> pd.DataFrame:
    """Return one column of several histories: a row per round, a column per history."""
    missing = [h for h in histories if column not in h]
    if missing:
        raise ValueError(
            f"a history has no column '{column}': its columns are {', '.join(map(str, missing[0].columns))}"
        )
    series = [h.set_index("round")[column].astype(float).dropna() for h in histories]
    return pd.concat(series, axis=1, ignore_index=True)


def _set_limits(ax: Axes, late: tuple[float, float], whole: tuple[float, float]) -> None:
    """Show `late` and up to 3 times its height on either side; mark what is cut off of `whole`."""
    room = max(late[1] - late[0], 1e-9 * max(1.0, abs(late[1])))
    low, high = max(whole[0], late[0] - 3.0 * room), min(whole[1], late[1] + 3.0 * room)
    pad = 0.06 * max(high - low, room)
    ax.set_ylim(low - pad, high + pad)
    for cut, height, sign in ((whole[0] < low, 0.02, "↓"), (whole[1] > high, 0.93, "↑")):
        if cut:
            end = whole[0] if sign == "↓" else whole[1]
            style: dict[str, Any] = {"fontsize": "small", "ha": "right", "va": "bottom"}
            ax.text(0.985, height, f"{sign} to {end:.4g}", transform=ax.transAxes, **style)


def messages(ax: Axes, logs: Mapping[str, pd.DataFrame]) -> Axes:
    """Draw a map of what left each node: a column for each step or round, darker for more bytes.

    Up to 60 cells have their number of bytes written in.

    Args:
        ax: axes to draw on.
        logs: node -> what it logged, `pandas.read_json(f"{folder}/left.jsonl", lines=True)`: a row
            a message, with the columns `what`, `round` (missing before the first) and `bytes`.

    Raises:
        ValueError: no node has sent anything.
    """
    table = pd.concat([log.assign(node=node) for node, log in logs.items()] or [pd.DataFrame()])
    if not len(table):
        raise ValueError("no node has sent anything: give each node's left.jsonl, as a frame")
    step = [w if pd.isna(r) else f"round {r:.0f}" for w, r in table[["what", "round"]].to_numpy()]
    cells = table.assign(step=step).pivot_table("bytes", "node", "step", "sum", sort=False)
    from seaborn import heatmap  # only here: it takes a second to import

    style: dict[str, Any] = {"cmap": "Blues", "norm": LogNorm(), "cbar": False, "linewidths": 1.0}
    heatmap(cells, ax=ax, annot=cells.size <= 60, fmt=".0f", annot_kws={"fontsize": 7}, **style)
    ax.tick_params(length=0, rotation=0)
    ax.tick_params("x", rotation=90)
    ax.set(xlabel="bytes that left each node", ylabel="")
    return ax


def k_hats(ax: Axes, values: pd.Series, *, limit: float = K_HAT) -> Axes:
    """Draw each client's Pareto k-hat, highest at the top; those not below `limit` are crosses.

    Args:
        ax: axes to draw on.
        values: client -> k-hat, such as `diagnostics.loo(fit, "client").table["k_hat"]`. Up to 40 are named.
        limit: below it weights can be trusted (Vehtari et al. 2024).
    """
    values = values.sort_values(ascending=False)
    at, bad = np.arange(len(values)), (values >= limit).to_numpy()
    ax.axvline(limit, color=GRAY, linestyle="--", linewidth=1.0, zorder=1)
    ax.plot(values[~bad], at[~bad], "o", color=COLORS[0], markersize=4.0)
    ax.plot(values[bad], at[bad], "X", color=COLORS[1], markersize=6.0)
    if len(values) <= NAMED:
        ax.set_yticks(at, list(values.index))
        ax.tick_params(axis="y", length=0)
    ax.set(xlabel="Pareto k-hat", ylim=(len(values) - 0.4, -0.6))
    return plain(ax)


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
    style: dict[str, Any] = {"color": BAND, "linewidth": 0.0, "step": "mid"}
    ax.fill_between(at, frame.low - at, frame.high - at, label=f"{prob:.0%} band", **style)
    names = [name for name in frame.columns if name not in ("low", "high")]
    many = len(names) > len(COLORS)  # then all in one color
    for k, name in enumerate(names):
        label = f"{site}{name}" if name.startswith("[") else name or site
        if many:
            label = f"{len(names)} scalars" if k == 0 else None
        style = {"color": COLORS[0 if many else k], "linewidth": 0.8 if many else 1.4}
        ax.plot(at, frame[name] - at, alpha=0.6 if many else 1.0, label=label, **style)
    ax.axhline(0.0, color="0.4", linewidth=0.7, linestyle=":")
    ax.set(xlim=(0.0, 1.0), xlabel="fractional rank of the true value")
    ax.set_ylabel("ECDF minus uniform CDF")
    ax.set_title(site, fontsize=9, loc="left")
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
    place |= {"ncols": 3, "borderaxespad": 0.1, "columnspacing": 1.0}
    ax.legend(frameon=False, fontsize=7, **place)
    return plain(ax)


def sensitivity(ax: Axes, result: Sensitivity, *, what: str = "left_out") -> Axes:
    """Draw by how many posterior sds each parameter moves with each part of a model, as a map.

    Blue cells move down, orange ones up; each has its number, and "?" where a k-hat is high.

    Args:
        ax: axes to draw on.
        result: from `hierfl.diagnostics.sensitivity`.
        what: a column of its table: "left_out" (without a client), "per_percent", "at_0.8",
            "at_1.25".

    Raises:
        KeyError: there is no such column.
    """
    table = result.table[what]
    moves = table.unstack("part", sort=False).reindex(table.index.unique("parameter"))
    moves = moves.drop(columns="prior") if what == "left_out" else moves
    values = moves.to_numpy(dtype=float)
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max()) if len(finite) else 1.0
    ends = [COLORS[0], "white", COLORS[1]]
    shades = LinearSegmentedColormap.from_list("moves", ends).with_extremes(bad=BAND)
    drawn = ax.imshow(values, cmap=shades, vmin=-largest, vmax=largest, aspect="auto")
    if moves.shape[1] <= NAMED:
        for (row, column), value in np.ndenumerate(values):
            text = "?" if np.isnan(value) else f"{value:.2g}"
            ax.text(column, row, text, ha="center", va="center", fontsize=7)
        ax.set_xticks(range(values.shape[1]), list(moves.columns), rotation=30, ha="right")
    ax.set_yticks(range(len(values)), list(moves.index))
    ax.figure.colorbar(drawn, ax=ax).set_label("moves the mean by posterior sds")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax
