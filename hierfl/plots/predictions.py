"""Predictions beside what came true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import ScalarFormatter
from numpy.typing import ArrayLike
from scipy.stats import beta

from hierfl.diagnostics.calibration import equal_mass
from hierfl.diagnostics.ood import entropy_density
from hierfl.plots.style import BAND, COLOURS, GREY, MARKERS, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEEP = 8.0  # a density that is higher somewhere hides what is low on a linear axis


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
        style: dict[str, Any] = {
            "color": colours[k % len(colours)],
            "marker": MARKERS[k % len(MARKERS)],
            "zorder": 3,
        }
        bars = [share - low, high - share]
        ax.errorbar(
            mean + shifts[k],
            share,
            yerr=bars,
            label=name,
            linewidth=1.0,
            markersize=4.5,
            elinewidth=1.0,
            **style,
        )
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    ax.set_xticks([0.0, 0.25, 0.5, 0.75, 1.0])
    ax.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0])
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def coverage(ax: Axes, replicates: ArrayLike, labels: ArrayLike, *, prob: float = 0.9) -> Axes:
    """How often central intervals hold a number, by their probability: on the diagonal, they are calibrated; below, too narrow.

    Args:
        ax: to draw on.
        replicates: (S, n), of `Fit.replicate`.
        labels: (n,).
        prob: of the interval of each share.
    """
    draws, y = np.asarray(replicates, dtype=float), np.asarray(labels, dtype=float)
    if draws.ndim != 2 or draws.shape[1:] != y.shape:
        raise ValueError(
            f"replicates have shape {draws.shape}, labels {y.shape}: (S, n) and (n,) are needed"
        )
    nominal = np.linspace(0.05, 0.95, 19)
    ends = np.quantile(draws, [0.5 - nominal / 2, 0.5 + nominal / 2], axis=0, method="inverted_cdf")
    hits = ((ends[0] <= y) & (y <= ends[1])).sum(-1)
    tail = (1.0 - prob) / 2.0
    low, high = (beta.ppf(at, hits + 0.5, len(y) - hits + 0.5) for at in (tail, 1.0 - tail))
    ax.plot([0.0, 1.0], [0.0, 1.0], color="0.6", linewidth=1.0, zorder=1)
    ax.fill_between(nominal, low, high, color=COLOURS[0], alpha=0.2, linewidth=0.0, zorder=2)
    ax.plot(
        nominal,
        hits / len(y),
        color=COLOURS[0],
        marker=MARKERS[0],
        markersize=3.0,
        linewidth=1.2,
        zorder=3,
    )
    ax.set(
        xlim=(0.0, 1.0),
        ylim=(0.0, 1.0),
        aspect="equal",
        xlabel="probability of the interval",
        ylabel="share of rows inside",
    )
    return plain(ax)


def rates(ax: Axes, table: pd.DataFrame, *, most: int = 40) -> Axes:
    """Each client's mean label beside the predictive interval of it, of `hierfl.diagnostics.client_rates`.

    Args:
        ax: to draw on.
        table: a row a client: rows, observed, expected, low, high, covered.
        most: clients with a line of their own and a name; of more, the order is that of the expected mean, along the x axis.
    """
    if len(table) <= most:
        at = np.arange(len(table), dtype=float)
        ax.hlines(
            at, table["low"], table["high"], color=BAND, linewidth=7.0, label="predicted", zorder=1
        )
        ax.plot(table["expected"], at, "|", color=GREY, markersize=9.0, zorder=2)
        x, y = table["observed"].to_numpy(), at
        ax.set_yticks(
            at, [f"{name} ({rows})" for name, rows in zip(table.index, table["rows"], strict=True)]
        )
        ax.set_ylim(len(table) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
    else:
        table = table.sort_values("expected")
        at = np.arange(len(table), dtype=float)
        ax.vlines(
            at, table["low"], table["high"], color=BAND, linewidth=2.2, label="predicted", zorder=1
        )
        x, y = at, table["observed"].to_numpy()
        ax.set_xlabel("clients, by what is expected of them")
    inside = table["covered"].to_numpy(dtype=bool)
    for chosen, label, colour, marker in (
        (inside, "observed", COLOURS[0], "o"),
        (~inside, "observed, outside", COLOURS[1], "X"),
    ):
        if chosen.any():
            ax.scatter(
                x[chosen],
                y[chosen],
                s=26.0,
                color=colour,
                marker=marker,
                edgecolor="white",
                linewidth=0.4,
                label=label,
                zorder=3,
            )
    return plain(ax)


def entropies(
    ax: Axes,
    own: ArrayLike,
    foreign: ArrayLike,
    *,
    labels: tuple[str, str] = ("own rows", "foreign rows"),
) -> Axes:
    """Densities of predictive entropy of own and of foreign rows: thin lines are clients, thick ones all of them (FedABML, Fig. 5).

    Args:
        ax: to draw on.
        own: (n,) nats, or (clients, n).
        foreign: the same.
        labels: of the two.
    """
    sets = [np.asarray(values, dtype=float) for values in (own, foreign)]
    grid = np.linspace(0.0, max(float(v.max()) for v in sets) * 1.04 + 0.02, 200)
    highest = 0.0
    for values, colour, dash, label in zip(sets, COLOURS, ("-", "--"), labels, strict=False):
        for client in values if values.ndim == 2 else ():
            ax.plot(grid, entropy_density(client, grid), color=colour, linewidth=0.5, alpha=0.35)
        density = entropy_density(values, grid)
        highest = max(highest, float(density.max()))
        ax.plot(grid, density, color=colour, linewidth=2.0, linestyle=dash, label=label)
    steep = highest > STEEP
    if steep:
        ax.set_yscale("symlog", linthresh=1.0)
        ax.yaxis.set_major_formatter(ScalarFormatter())
    ax.set_ylim(0.0, None)
    ax.set(
        xlabel="entropy of the prediction, nats",
        ylabel="density (above 1: log scale)" if steep else "density",
    )
    return plain(ax)
