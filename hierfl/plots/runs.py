"""Plots of the progress of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd

from hierfl.plots.style import COLORS, MARKERS, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    named = histories if isinstance(histories, Mapping) else {column: histories}
    late, whole = [], []
    for k, (name, each) in enumerate(named.items()):
        table = _by_round([each] if isinstance(each, pd.DataFrame) else list(each), column)
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
            f"a history has no column '{column}': its columns are "
            f"{', '.join(map(str, missing[0].columns))}"
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
