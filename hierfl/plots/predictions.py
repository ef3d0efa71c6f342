"""Plots of predictions against the observed labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import ScalarFormatter
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta, binom

from hierfl.diagnostics.calibration import equal_mass
from hierfl.diagnostics.ood import entropy_density
from hierfl.plots.style import BAND, COLORS, GRAY, MARKERS, NAMED, arrays, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
STEEP = 8.0  # with a higher peak, a linear axis would hide the low parts of a density


def reliability(
    ax: Axes,
    predicted: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    bins: int = 8,
    prob: float = 0.9,
    colors: Sequence[str] = COLORS,
) -> Axes:
    """Draw the share of labels that are 1 against the predicted probability.

    On the diagonal, predictions are calibrated. Rows are sorted by predicted probability and cut
    into bins of equal size (within one row). Each point shows the mean prediction of its bin and
    the share of ones, with Jeffreys' interval (Brown, Cai and DasGupta 2001): how far chance alone
    would move the point.

    Args:
        ax: axes to draw on.
        predicted: legend name -> (probabilities (n,), labels 0/1 (n,)).
        bins: number of bins, reduced if needed so that each has at least 2 rows.
        prob: probability of the error bars.
        colors: one per name, in order.

    Raises:
        ValueError: probabilities and labels have different lengths, or there are no rows.
    """
    ax.plot([0.0, 1.0], [0.0, 1.0], color="0.6", linewidth=1.0, zorder=1)
    shifts = np.linspace(-0.006, 0.006, len(predicted)) if len(predicted) > 1 else np.zeros(1)
    for k, (name, (p, y)) in enumerate(predicted.items()):
        mean, share, low, high = equal_mass(p, y, bins=bins, prob=prob)
        style: dict[str, Any] = {
            "linewidth": 1.0,
            "elinewidth": 1.0,
            "markersize": 4.5,
            "zorder": 3,
        }
        style |= {"color": colors[k % len(colors)], "marker": MARKERS[k % len(MARKERS)]}
        bars = [share - low, high - share]
        ax.errorbar(mean + shifts[k], share, yerr=bars, label=name, **style)
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    ax.set(xlabel="predicted probability", ylabel="share of labels that are 1")
    ax.set(xticks=np.linspace(0.0, 1.0, 5), yticks=np.linspace(0.0, 1.0, 5))
    return plain(ax)


def coverage(ax: Axes, replicates: ArrayLike, labels: ArrayLike, *, prob: float = 0.9) -> Axes:
    """Draw the observed coverage of central predictive intervals against their probability.

    On the diagonal the intervals are calibrated; below it they are too narrow.

    Args:
        ax: axes to draw on.
        replicates: (S, n) draws of the labels, from `Fit.replicate`.
        labels: (n,) observed labels.
        prob: probability of the band around the observed coverage (Jeffreys' interval).

    Raises:
        ValueError: `replicates` and `labels` do not have the shapes (S, n) and (n,).
    """
    draws, y = arrays(replicates=(replicates, ("S", "n")), labels=(labels, ("n",)))
    nominal = np.linspace(0.05, 0.95, 19)
    ends = np.quantile(draws, [0.5 - nominal / 2, 0.5 + nominal / 2], axis=0, method="inverted_cdf")
    hits = ((ends[0] <= y) & (y <= ends[1])).sum(-1)
    tail = (1.0 - prob) / 2.0
    low, high = (beta.ppf(at, hits + 0.5, len(y) - hits + 0.5) for at in (tail, 1.0 - tail))
    ax.plot([0.0, 1.0], [0.0, 1.0], color="0.6", linewidth=1.0, zorder=1)
    ax.fill_between(nominal, low, high, color=COLORS[0], alpha=0.2, linewidth=0.0, zorder=2)
    style: dict[str, Any] = {"color": COLORS[0], "marker": MARKERS[0], "markersize": 3.0}
    ax.plot(nominal, hits / len(y), linewidth=1.2, zorder=3, **style)
    ax.set(xlim=(0.0, 1.0), ylim=(0.0, 1.0), aspect="equal")
    ax.set(xlabel="probability of the interval", ylabel="share of rows inside the interval")
    return plain(ax)


def pit(
    ax: Axes, replicates: ArrayLike, labels: ArrayLike, *, bins: int = 20, prob: float = 0.95
) -> Axes:
    """Draw a histogram of probability integral transforms, which are uniform where predictions are right.

    The transform of a row is the share of its replicates below the label; of those equal to it, a
    half counts. A hump in the middle shows intervals that are too wide, horns at the ends intervals
    that are too narrow, a slope a bias.

    Args:
        ax: axes to draw on.
        replicates: (S, n) draws of the labels, from `Fit.replicate`.
        labels: (n,) observed labels.
        bins: number of bins between 0 and 1.
        prob: probability of the band for a single bin, if the transforms are uniform.

    Raises:
        ValueError: `replicates` and `labels` do not have the shapes (S, n) and (n,).
    """
    draws, y = arrays(replicates=(replicates, ("S", "n")), labels=(labels, ("n",)))
    at = ((draws < y) + 0.5 * (draws == y)).mean(0)
    ax.hist(at, bins=bins, range=(0.0, 1.0), color=COLORS[0], edgecolor="white", alpha=0.75)
    low, high = binom.interval(prob, len(y), 1.0 / bins)
    ax.axhspan(low, high, color=BAND, zorder=0, label=f"{prob:.0%} range if uniform")
    ax.set(xlabel="probability integral transform", ylabel="rows", xlim=(0.0, 1.0))
    return plain(ax)


def rates(ax: Axes, table: pd.DataFrame) -> Axes:
    """Draw each client's observed mean label over its predictive interval.

    Args:
        ax: axes to draw on.
        table: result of `hierfl.diagnostics.client_rates`, one row per client. Up to 40 have a line
            and a name each; more are unnamed, and sorted along the x axis by their expected mean.
    """
    at, with_names = np.arange(len(table), dtype=float), len(table) <= NAMED
    table = table if with_names else table.sort_values("expected")
    x, y = table["observed"].to_numpy(), at
    style: dict[str, Any] = {"color": BAND, "linewidth": 7.0 if with_names else 2.2, "zorder": 1}
    draw = ax.hlines if with_names else ax.vlines
    draw(at, table["low"], table["high"], label="predictive interval", **style)
    if with_names:
        ax.plot(table["expected"], at, "|", color=GRAY, markersize=9.0, zorder=2)
        clients = zip(table.index, table["rows"], strict=True)
        ax.set_yticks(at, [f"{name} ({rows})" for name, rows in clients])
        ax.set_ylim(len(table) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
    else:
        x, y = at, x
        ax.set_xlabel("clients, sorted by predicted mean")
    inside = table["covered"].to_numpy(dtype=bool)
    style = {"s": 26.0, "edgecolor": "white", "linewidth": 0.4, "zorder": 3}
    for chosen, label, color, marker in (
        (inside, "observed", COLORS[0], "o"),
        (~inside, "observed, outside the interval", COLORS[1], "X"),
    ):
        if chosen.any():
            ax.scatter(x[chosen], y[chosen], color=color, marker=marker, label=label, **style)
    return plain(ax)


def _of_clients(values: ArrayLike | Sequence[ArrayLike]) -> list[Floats]:
    """Return an array for each client, or one of all rows."""
    arrays = [np.asarray(client, dtype=float) for client in values]  # type: ignore[union-attr]
    return arrays if arrays[0].ndim else [np.array(arrays)]


def entropies(
    ax: Axes,
    own: ArrayLike | Sequence[ArrayLike],
    foreign: ArrayLike | Sequence[ArrayLike],
    *,
    labels: tuple[str, str] = ("own rows", "foreign rows"),
) -> Axes:
    """Draw the densities of predictive entropy of own and of foreign rows.

    Thin lines are single clients, thick lines all clients together (FedABML, Fig. 5).

    Args:
        ax: axes to draw on.
        own: entropies of the clients' own rows, nats: (n,), or, to draw each client as well, an
            array for each, of any lengths.
        foreign: entropies of foreign rows, in the same form.
        labels: legend entries of own and foreign rows.
    """
    sets = [_of_clients(values) for values in (own, foreign)]
    whole = [np.concatenate(clients) for clients in sets]
    grid = np.linspace(0.0, max(float(v.max()) for v in whole) * 1.04 + 0.02, 200)
    highest = 0.0
    for clients, values, color, dash, label in zip(
        sets, whole, COLORS, ("-", "--"), labels, strict=False
    ):
        for client in clients if len(clients) > 1 else ():
            ax.plot(grid, entropy_density(client, grid), color=color, linewidth=0.5, alpha=0.35)
        density = entropy_density(values, grid)
        highest = max(highest, float(density.max()))
        ax.plot(grid, density, color=color, linewidth=2.0, linestyle=dash, label=label)
    steep = highest > STEEP
    if steep:
        ax.set_yscale("symlog", linthresh=1.0)
        ax.yaxis.set_major_formatter(ScalarFormatter())
    ax.set_ylim(0.0, None)
    ax.set(
        xlabel="predictive entropy, nats",
        ylabel="density (log scale above 1)" if steep else "density",
    )
    return plain(ax)
