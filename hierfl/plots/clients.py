"""Clients beside one another: forests, shrinkage, what the global level expects of them, and maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray
from scipy.stats import gaussian_kde

from hierfl.plots.style import BAND, COLOURS, GREY, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
NAMED = 40  # clients that can be named one a line


def client_forest(
    ax: Axes,
    draws: ArrayLike,
    names: Sequence[str],
    *,
    rows: ArrayLike | None = None,
    alone: ArrayLike | None = None,
    expected: ArrayLike | None = None,
    prob: float = 0.9,
) -> Axes:
    """One number of every client: median, 50 % and wider intervals, over what the global level expects of a client.

    Clients stand in the order of their rows, the one with most on top, so that intervals widen, and estimates draw together, downwards.

    Args:
        ax: to draw on.
        draws: (S, N), of the posterior.
        names: of the clients; shown with their rows, if there are at most 40.
        rows: (N,); marks grow with it.
        alone: (N,) what each client would have estimated alone: a hollow mark.
        expected: (S, N) or (S,) draws of what the global level expects, of each client or of a new one: a grey band.
        prob: of the wider interval.
    """
    values = _draws(draws, names)
    count = np.ones(len(names)) if rows is None else np.asarray(rows, dtype=float)
    order = np.argsort(-count, kind="stable")
    tails = [0.5 - prob / 2, 0.25, 0.5, 0.75, 0.5 + prob / 2]
    if expected is not None:
        _prior_band(ax, np.asarray(expected, dtype=float), order, tails)
    size = _sizes(count[order], largest=46.0 if len(names) <= NAMED else 22.0)
    _posterior_intervals(ax, values[:, order], tails, size)
    if alone is not None:
        _local_only_marks(ax, np.asarray(alone, dtype=float)[order], size)
    _label_clients(ax, [names[i] for i in order], count[order], with_rows=rows is not None)
    return plain(ax)


def _prior_band(ax: Axes, band: Floats, order: NDArray[np.intp], tails: list[float]) -> None:
    at = np.arange(len(order), dtype=float)
    ends = np.quantile(band, tails, axis=0)
    left, centre, right = (np.broadcast_to(ends[i], len(order)) for i in (0, 2, 4))
    if band.ndim == 2:
        left, centre, right = left[order], centre[order], right[order]
    ax.barh(
        at,
        right - left,
        left=left,
        height=1.0,
        color=BAND,
        label="expected of a client",
        zorder=1,
    )
    ax.vlines(centre, at - 0.5, at + 0.5, color=GREY, linewidth=1.0, zorder=2)


def _posterior_intervals(ax: Axes, values: Floats, tails: list[float], size: Floats) -> None:
    at = np.arange(values.shape[1], dtype=float)
    low, q1, middle, q3, high = np.quantile(values, tails, axis=0)
    thin = 1.0 if len(at) <= NAMED else 0.6
    ax.hlines(at, low, high, color=COLOURS[0], linewidth=thin, zorder=3)
    ax.hlines(at, q1, q3, color=COLOURS[0], linewidth=2.6 * thin, zorder=3)
    ax.scatter(
        middle,
        at,
        s=size,
        color=COLOURS[0],
        edgecolor="white",
        linewidth=0.4,
        label="posterior",
        zorder=4,
    )


def _local_only_marks(ax: Axes, alone: Floats, size: Floats) -> None:
    at = np.arange(len(alone), dtype=float)
    style: dict[str, Any] = {
        "facecolor": "white",
        "edgecolor": COLOURS[1],
        "linewidth": 1.1,
        "marker": "D",
        "zorder": 3.5,
    }
    ax.scatter(alone, at, s=np.maximum(size * 0.7, 8.0), label="its own rows alone", **style)


def _label_clients(ax: Axes, names: list[str], rows: Floats, *, with_rows: bool) -> None:
    if len(names) <= NAMED:
        label = [f"{name} ({int(n)})" for name, n in zip(names, rows, strict=True)]
        ax.set_yticks(np.arange(len(names), dtype=float), label if with_rows else names)
        ax.tick_params(axis="y", length=0)
    else:
        ax.set_yticks([0, len(names) - 1], [f"{int(rows[0])} rows", f"{int(rows[-1])}"])
    ax.set_ylim(len(names) - 0.4, -0.6)


def shrinkage(
    ax: Axes,
    alone: ArrayLike,
    together: ArrayLike,
    *,
    rows: ArrayLike | None = None,
    centre: float | None = None,
) -> Axes:
    """How far the hierarchy moves each client's estimate from what its own rows alone say, towards the middle of all.

    On the diagonal nothing is borrowed; on the flat line everything is. A line leads from the one to the other: its upper end is on
    the diagonal, where the client alone would stand.

    Args:
        ax: to draw on.
        alone: (N,) local-only estimates.
        together: (N,) hierarchical estimates.
        rows: (N,); marks grow with it.
        centre: the middle that estimates are drawn to; None: no line.

    Raises:
        ValueError: not as many of the one as of the other.
    """
    x, y = np.asarray(alone, dtype=float), np.asarray(together, dtype=float)
    if x.shape != y.shape or x.ndim != 1 or not len(x):
        raise ValueError(
            f"estimates have the shapes {x.shape} and {y.shape}: both must be (N,), N > 0"
        )
    count = np.ones(len(x)) if rows is None else np.asarray(rows, dtype=float)
    span = np.array([min(x.min(), y.min()), max(x.max(), y.max())])
    span += 0.06 * max(float(np.ptp(span)), 1e-9) * np.array([-1.0, 1.0])
    _reference_lines(ax, span, centre)
    ax.vlines(x, x, y, color=COLOURS[5], linewidth=0.9, zorder=2)
    size = _sizes(count, largest=70.0)
    ax.scatter(
        x,
        y,
        s=size,
        color=COLOURS[0],
        edgecolor="white",
        linewidth=0.5,
        label="a client, sized by rows",
        zorder=3,
    )
    ax.set(
        xlim=span, ylim=span, aspect="equal", xlabel="its own rows alone", ylabel="in the hierarchy"
    )
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(6))
    return plain(ax)


def _reference_lines(ax: Axes, span: Floats, centre: float | None) -> None:
    ax.plot(
        span, span, color=GREY, linewidth=1.0, linestyle="--", label="nothing borrowed", zorder=1
    )
    if centre is not None:
        ax.axhline(
            centre,
            color=GREY,
            linewidth=1.0,
            linestyle=":",
            label="middle of all clients",
            zorder=1,
        )


def prior_and_clients(
    ax: Axes, expected: ArrayLike, draws: ArrayLike, names: Sequence[str]
) -> Axes:
    """The density of what the global level expects of a client, and of every client's posterior.

    Args:
        ax: to draw on.
        expected: (S,) or (S, N) draws of the first.
        draws: (S, N) of the second.
        names: of the clients: up to six have a colour and a name each, more are thin lines of one colour.
    """
    values, prior = _draws(draws, names), np.asarray(expected, dtype=float).ravel()
    ends = np.quantile(np.concatenate([prior, values.ravel()]), [0.003, 0.997])
    margin = 0.05 * float(np.ptp(ends))
    grid = np.linspace(float(ends[0]) - margin, float(ends[1]) + margin, 300)
    height = _kde(prior, grid)
    ax.fill_between(grid, height, color=BAND, linewidth=0.0, zorder=1)
    ax.plot(grid, height, color="black", linewidth=2.2, label="expected of a client", zorder=3)
    few = len(names) <= len(COLOURS)
    for k, name in enumerate(names):
        style: dict[str, Any] = {
            "color": COLOURS[k if few else 0],
            "linewidth": 1.4 if few else 0.7,
        }
        style |= {
            "alpha": 1.0 if few else 0.55,
            "linestyle": ("-", "--", "-.", (0, (1, 1)))[k % 4] if few else "-",
        }
        ax.plot(
            grid,
            _kde(values[:, k], grid),
            label=name if few else ("a client" if k == 0 else None),
            zorder=2,
            **style,
        )
    ax.set(xlim=(grid[0], grid[-1]), ylim=(0.0, None), ylabel="density")
    ax.set_yticks([])
    return plain(ax)


def client_map(
    ax: Axes,
    means: ArrayLike,
    names: Sequence[str],
    *,
    rows: ArrayLike | None = None,
    unit: ArrayLike | None = None,
) -> Axes:
    """Clients as points in a plane: the first two principal components of what each is like.

    Args:
        ax: to draw on.
        means: (N, d) posterior means, or whatever clients are to be compared by.
        names: of the clients; where there are more than 40 only the outermost are named.
        rows: (N,); marks grow with it.
        unit: (d,) what each column is divided by, the posterior sd for one, so that a number in which clients hardly differ counts
            for little; None: the standard deviation over clients, so that all count alike.

    Raises:
        ValueError: fewer than three clients, or none differ.
    """
    values = np.asarray(means, dtype=float).reshape(len(names), -1)
    sd = values.std(0)
    if len(names) < 3 or not (sd > 0.0).any():
        raise ValueError(
            f"a map needs three clients or more that differ, and has {len(names)}, {int((sd > 0).sum())} numbers differ"
        )
    scale = sd if unit is None else np.asarray(unit, dtype=float)
    at, share = _components((values - values.mean(0))[:, sd > 0.0] / scale[sd > 0.0])
    count = np.ones(len(names)) if rows is None else np.asarray(rows, dtype=float)
    size = _sizes(count, largest=110.0)
    ax.axhline(0.0, color=BAND, linewidth=0.8, zorder=0)
    ax.axvline(0.0, color=BAND, linewidth=0.8, zorder=0)
    ax.scatter(
        at[:, 0],
        at[:, 1],
        s=size,
        color=COLOURS[0],
        alpha=0.85,
        edgecolor="white",
        linewidth=0.5,
        zorder=2,
    )
    _name_outermost(ax, at, names, size)
    ax.margins(0.16)
    ax.set(xlabel=f"first component ({share[0]:.0%})", ylabel=f"second component ({share[1]:.0%})")
    ax.set_xticks([])
    ax.set_yticks([])
    return plain(ax)


def _components(centred: Floats) -> tuple[Floats, Floats]:
    """First two principal components (N, 2) of centred columns (N, d), and their shares of the variance (2,)."""
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    at, share, kept = np.zeros((len(centred), 2)), np.zeros(2), min(2, len(singular))
    at[:, :kept] = left[:, :kept] * singular[:kept]
    at *= np.where(
        np.abs(at).max(0) == at.max(0), 1.0, -1.0
    )  # a component has no sign of its own: its largest is positive
    share[:kept] = (singular**2 / (singular**2).sum())[:kept]
    return at, share


def _name_outermost(ax: Axes, at: Floats, names: Sequence[str], size: Floats) -> None:
    far = np.argsort(-np.linalg.norm(at, axis=1))[: len(names) if len(names) <= 12 else 8]
    for i in far:
        ax.annotate(
            names[i],
            at[i],
            xytext=(0, 2.0 + size[i] ** 0.5 / 2),
            textcoords="offset points",
            ha="center",
            fontsize="small",
        )


def _draws(draws: ArrayLike, names: Sequence[str]) -> Floats:
    values = np.asarray(draws, dtype=float)
    if values.ndim != 2 or values.shape[1] != len(names):
        raise ValueError(
            f"draws have shape {values.shape}: (S, {len(names)}) are needed, a column a client"
        )
    return values


def _sizes(rows: Floats, *, largest: float) -> Floats:
    """Areas of marks: in proportion to rows, none too small to be seen."""
    found: Floats = np.maximum(largest * rows / rows.max(), 6.0)
    return found


def _kde(values: Floats, grid: Floats) -> Floats:
    if float(values.std()) < 1e-12 * max(1.0, float(np.abs(values).max())):
        return np.zeros_like(grid)  # a point has no density
    found: Floats = gaussian_kde(values)(grid)
    return found
