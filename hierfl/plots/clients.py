"""Plots that compare clients: forests, shrinkage, and the global prior beside the posteriors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray
from scipy.stats import gaussian_kde

from hierfl.plots.style import BAND, COLORS, GRAY, MARKERS, NAMED, POINTS, arrays, mark_areas, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import DataArray

Floats = NDArray[np.float64]


def client_forest(
    ax: Axes,
    draws: ArrayLike,
    names: Sequence[str],
    *,
    rows: ArrayLike | None = None,
    local_only: ArrayLike | None = None,
    prior: ArrayLike | None = None,
    prob: float = 0.9,
) -> Axes:
    """Draw a forest plot of one scalar of every client, over the global prior.

    The global prior is the distribution that the global level alone predicts for a client. Each
    client has one line with its posterior median, its 50% interval and a wider interval. Clients
    are sorted by number of rows, the largest at the top: downwards, intervals widen and estimates
    come closer together.

    Args:
        ax: axes to draw on.
        draws: (S, N) posterior draws, one column per client.
        names: N client names. Up to 40 clients are named, with their number of rows if `rows` is
            given.
        rows: (N,) number of rows of each client; the area of a mark grows with it. None: all marks
            have the same size.
        local_only: (N,) local-only estimates, from each client's own rows; hollow diamonds.
        prior: draws of the global prior, (S, N) for each client or (S,) for a new one; drawn as a
            gray band with a line at the median.
        prob: probability of the wider interval and of the gray band.

    Raises:
        ValueError: `draws` does not have the shape (S, N) for N names.
    """
    (values,) = arrays(draws=(draws, ("S", len(names))))
    count = np.ones(len(names)) if rows is None else np.asarray(rows, dtype=float)
    order = np.argsort(-count, kind="stable")
    tails = [0.5 - prob / 2, 0.25, 0.5, 0.75, 0.5 + prob / 2]
    if prior is not None:
        _prior_band(ax, np.asarray(prior, dtype=float), order, tails)
    size = mark_areas(count[order], largest=46.0 if len(names) <= NAMED else 22.0)
    at, thin = np.arange(len(names), dtype=float), 1.0 if len(names) <= NAMED else 0.6
    low, q1, middle, q3, high = np.quantile(values[:, order], tails, axis=0)
    ax.hlines(at, low, high, color=COLORS[0], linewidth=thin, zorder=3)
    ax.hlines(at, q1, q3, color=COLORS[0], linewidth=2.6 * thin, zorder=3)
    ax.scatter(middle, at, s=size, linewidth=0.4, label="posterior", zorder=4, **POINTS)
    if local_only is not None:
        style: dict[str, Any] = {"facecolor": "white", "edgecolor": COLORS[1], "marker": "D"}
        style |= {"s": np.maximum(size * 0.7, 8.0), "linewidth": 1.1, "zorder": 3.5}
        alone = np.asarray(local_only, dtype=float)[order]
        ax.scatter(alone, at, label="own rows only", **style)
    _label_clients(ax, [names[i] for i in order], count[order], with_rows=rows is not None)
    return plain(ax)


def _prior_band(ax: Axes, band: Floats, order: NDArray[np.intp], tails: list[float]) -> None:
    at = np.arange(len(order), dtype=float)
    ends = np.quantile(band, tails, axis=0)
    low, center, high = (np.broadcast_to(ends[i], len(order)) for i in (0, 2, 4))
    if band.ndim == 2:
        low, center, high = low[order], center[order], high[order]
    ax.barh(at, high - low, left=low, height=1.0, color=BAND, label="global prior", zorder=1)
    ax.vlines(center, at - 0.5, at + 0.5, color=GRAY, linewidth=1.0, zorder=2)


def _label_clients(ax: Axes, names: list[str], rows: Floats, *, with_rows: bool) -> None:
    """Name each client on the y axis; of more than 40, only the first and last row counts."""
    if len(names) <= NAMED:
        label = [f"{name} ({int(n)})" for name, n in zip(names, rows, strict=True)]
        ax.set_yticks(np.arange(len(names), dtype=float), label if with_rows else names)
        ax.tick_params(axis="y", length=0)
    else:
        ax.set_yticks([0, len(names) - 1], [f"{int(rows[0])} rows", f"{int(rows[-1])}"])
    ax.set_ylim(len(names) - 0.4, -0.6)


def shrinkage(
    ax: Axes,
    local_only: ArrayLike,
    together: ArrayLike,
    *,
    rows: ArrayLike | None = None,
    center: float | None = None,
) -> Axes:
    """Draw how far the hierarchical model moves each client's local-only estimate.

    A client on the diagonal borrows nothing from the others. A client on the horizontal line at
    `center` borrows everything. A vertical line joins each point to the diagonal, where the local-
    only estimate would be.

    Args:
        ax: axes to draw on.
        local_only: (N,) local-only estimates, from each client's own rows.
        together: (N,) estimates of the hierarchical model.
        rows: (N,) number of rows of each client, as in `client_forest`.
        center: value toward which estimates are shrunk; None: no line is drawn.

    Raises:
        ValueError: `local_only` and `together` are not both (N,), or are empty.
    """
    x, y = arrays(local_only=(local_only, ("N",)), together=(together, ("N",)))
    count = np.ones(len(x)) if rows is None else np.asarray(rows, dtype=float)
    span = np.array([min(x.min(), y.min()), max(x.max(), y.max())])
    span += 0.06 * max(float(np.ptp(span)), 1e-9) * np.array([-1.0, 1.0])
    dashed: dict[str, Any] = {"color": GRAY, "linewidth": 1.0, "zorder": 1}
    ax.plot(span, span, linestyle="--", label="no shrinkage", **dashed)
    if center is not None:
        ax.axhline(center, linestyle=":", label="common center", **dashed)
    ax.vlines(x, x, y, color=COLORS[5], linewidth=0.9, zorder=2)
    size = mark_areas(count, largest=70.0)
    label = "client (area: number of rows)"
    ax.scatter(x, y, s=size, linewidth=0.5, label=label, zorder=3, **POINTS)
    ax.set(xlim=span, ylim=span, aspect="equal")
    ax.set(xlabel="estimate from own rows only", ylabel="hierarchical estimate")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(6))
    return plain(ax)


def prior_and_clients(ax: Axes, prior: ArrayLike, draws: ArrayLike, names: Sequence[str]) -> Axes:
    """Draw the density of the global prior beside the density of every client's posterior.

    Args:
        ax: axes to draw on.
        prior: (S,) or (S, N) draws of what the global level alone predicts for a client.
        draws: (S, N) posterior draws, one column per client.
        names: N client names. Up to six clients have a color and a legend entry each; more are thin
            lines of one color.

    Raises:
        ValueError: `draws` does not have the shape (S, N) for N names.
    """
    (values,), prior = (
        arrays(draws=(draws, ("S", len(names)))),
        np.asarray(prior, dtype=float).ravel(),
    )
    ends = np.quantile(np.concatenate([prior, values.ravel()]), [0.003, 0.997])
    margin = 0.05 * float(np.ptp(ends))
    grid = np.linspace(float(ends[0]) - margin, float(ends[1]) + margin, 300)
    height = _kde(prior, grid)
    ax.fill_between(grid, height, color=BAND, linewidth=0.0, zorder=1)
    ax.plot(grid, height, color="black", linewidth=2.2, label="global prior", zorder=3)
    colored = len(names) <= len(COLORS)
    for k, name in enumerate(names):
        style: dict[str, Any] = {"color": COLORS[0], "linewidth": 0.7, "alpha": 0.55}
        if colored:
            dash = ("-", "--", "-.", (0, (1, 1)))[k % 4]
            style = {"color": COLORS[k], "linewidth": 1.4, "linestyle": dash}
        label = name if colored else ("a client" if k == 0 else None)
        ax.plot(grid, _kde(values[:, k], grid), label=label, zorder=2, **style)
    ax.set(xlim=(grid[0], grid[-1]), ylim=(0.0, None), ylabel="density")
    ax.set_yticks([])
    return plain(ax)


def _kde(values: Floats, grid: Floats) -> Floats:
    """Return a Gaussian kernel density estimate at `grid`; zero where all values are equal."""
    if float(values.std()) < 1e-12 * max(1.0, float(np.abs(values).max())):
        return np.zeros_like(grid)  # a point mass has no density
    density: Floats = gaussian_kde(values)(grid)
    return density


def client_map(
    ax: Axes,
    means: ArrayLike,
    names: Sequence[str],
    *,
    rows: ArrayLike | None = None,
    unit: ArrayLike | None = None,
) -> Axes:
    """Draw clients as points in a plane: the first two principal components of their means.

    Args:
        ax: axes to draw on.
        means: (N, d) posterior means, or any other columns by which clients are to be compared.
        names: N client names. Up to 12 clients are all named; of more, only the 8 farthest from the
            origin.
        rows: (N,) number of rows of each client, as in `client_forest`.
        unit: (d,) divisor of each column, for example the posterior sd: a column in which clients
            hardly differ then counts for little. None: the standard deviation over clients, so that
            all columns count equally.

    Raises:
        ValueError: there are fewer than three clients, or all clients are equal in every column.
    """
    values = np.asarray(means, dtype=float).reshape(len(names), -1)
    sd = values.std(0)
    if len(names) < 3 or not (sd > 0.0).any():
        raise ValueError(
            f"a map needs 3 or more clients that differ: there are {len(names)}, and they differ "
            f"in {int((sd > 0).sum())} columns"
        )
    scale = sd if unit is None else np.asarray(unit, dtype=float)
    scaled = (values - values.mean(0))[:, sd > 0.0] / scale[sd > 0.0]
    scores, singular, _ = np.linalg.svd(scaled, full_matrices=False)  # principal components
    at, share, rank = np.zeros((len(names), 2)), np.zeros(2), min(2, len(singular))
    at[:, :rank] = scores[:, :rank] * singular[:rank]
    # the sign of a component is arbitrary: make its largest entry positive
    at *= np.where(np.abs(at).max(0) == at.max(0), 1.0, -1.0)
    share[:rank] = (singular**2 / (singular**2).sum())[:rank]
    count = np.ones(len(names)) if rows is None else np.asarray(rows, dtype=float)
    size = mark_areas(count, largest=110.0)
    ax.axhline(0.0, color=BAND, linewidth=0.8, zorder=0)
    ax.axvline(0.0, color=BAND, linewidth=0.8, zorder=0)
    ax.scatter(at[:, 0], at[:, 1], s=size, alpha=0.85, linewidth=0.5, zorder=2, **POINTS)
    _name_outermost(ax, at, names, size)
    ax.margins(0.16)
    ax.set(xlabel=f"first component ({share[0]:.0%})", ylabel=f"second component ({share[1]:.0%})")
    ax.set(xticks=[], yticks=[])
    return plain(ax)


def _name_outermost(ax: Axes, at: Floats, names: Sequence[str], size: Floats) -> None:
    """Name all clients if there are up to 12, otherwise the 8 farthest from the origin."""
    far = np.argsort(-np.linalg.norm(at, axis=1))[: len(names) if len(names) <= 12 else 8]
    shown = at / np.maximum(np.ptp(at, axis=0), 1e-300)
    for i in far:  # on the side away from the nearest other name
        near = min(
            set(far) - {i}, key=lambda j: float(np.abs(shown[j] - shown[i]).sum()), default=i
        )
        side = 1.0 if (at[i, 1], i) >= (at[near, 1], near) else -1.0
        above = (0, side * (5.0 + size[i] ** 0.5 / 2))
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": "small"}
        ax.annotate(names[i], at[i], xytext=above, textcoords="offset points", **style)


def forest(
    ax: Axes,
    local: DataArray,
    prior: DataArray,
    *,
    prob: float = 0.9,
    labels: Mapping[str, str] | None = None,
) -> Axes:
    """Draw every client's coefficients (medians, intervals) over a band for the global prior.

    Args:
        ax: axes to draw on.
        local: posterior draws with the dimensions of the draws, `client`, and one dimension of
            named coefficients; or without that, of a scalar.
        prior: draws of a new client's coefficients: the same dimensions without `client`.
        prob: probability of the central intervals and of the band.
        labels: coefficient -> text on the y axis; default: its name.

    Raises:
        ValueError: `local` or `prior` is no xarray array; `local` has no dimension `client`, or several of
            coefficients.
    """
    local, prior, dim = _with_coefficients(local, prior)
    names = [str(name) for name in local.coords[dim].values]
    clients = [str(name) for name in local.coords["client"].values]
    at = np.arange(len(names), dtype=float)
    low, middle, high = _interval(prior, prob, dim)
    ax.barh(at, high - low, left=low, height=0.86, color="0.88", label="global prior", zorder=1)
    ax.vlines(middle, at - 0.43, at + 0.43, color="0.45", linewidth=1.2, zorder=2)
    shifts = np.linspace(-0.28, 0.28, len(clients)) if len(clients) > 1 else np.zeros(1)
    for k, client in enumerate(clients):
        low, middle, high = _interval(local.sel(client=client), prob, dim)
        style = {**_POINTS, "color": COLORS[k % len(COLORS)], "marker": MARKERS[k % len(MARKERS)]}
        bars = [middle - low, high - middle]
        ax.errorbar(middle, at + shifts[k], xerr=bars, label=client, zorder=3, **style)
    ax.axvline(0.0, color="black", linewidth=0.7, linestyle=":", zorder=2)
    ax.set_yticks(at, [(labels or {}).get(name, name) for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    return ax


def _with_coefficients(local: DataArray, prior: DataArray) -> tuple[DataArray, DataArray, str]:
    """Return draws and prior with one dimension of coefficients, and its name."""
    there = [getattr(value, "dims", ()) for value in (local, prior)]
    dims = [str(d) for d in there[0] if d not in ("chain", "draw", "client")]
    if not all(there) or "client" not in there[0] or len(dims) > 1:
        raise ValueError(
            f"local has the dimensions ({', '.join(map(str, there[0]))}), prior "
            f"({', '.join(map(str, there[1]))}): give arrays of fit.posterior().posterior and "
            "fit.prior().prior; local must have 'client' (a global site is drawn by "
            "arviz.plot_forest) and one of coefficients at most (choose by local.sel)"
        )
    if not dims:
        of_scalar = {"coefficient": [str(local.name)]}
        return local.expand_dims(of_scalar), prior.expand_dims(of_scalar), "coefficient"
    return local, prior, dims[0]


_POINTS: dict[str, Any] = {"linestyle": "none", "markersize": 3.2, "elinewidth": 1.0, "capsize": 0}


def _interval(draws: DataArray, prob: float, dim: str) -> tuple[NDArray[np.float64], ...]:
    """Return lower end, median and upper end of the central interval, each (coefficients,)."""
    over = [d for d in draws.dims if d != dim]
    quantiles = draws.quantile([0.5 - prob / 2, 0.5, 0.5 + prob / 2], dim=over).transpose(
        "quantile", dim
    )
    return tuple(np.asarray(quantiles, dtype=float))
