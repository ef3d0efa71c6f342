"""Plots of posteriors: the clients' coefficients beside each other and over the global prior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hierfl.plots.style import COLORS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import DataArray


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
            named coefficients.
        prior: draws of a new client's coefficients: the same dimensions without `client`.
        prob: probability of the central intervals and of the band.
        labels: coefficient -> text on the y axis; default: its name.
    """
    (dim,) = [str(d) for d in prior.dims if d not in ("chain", "draw")]
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


_POINTS: dict[str, Any] = {"linestyle": "none", "markersize": 3.2, "elinewidth": 1.0, "capsize": 0}


def _interval(draws: DataArray, prob: float, dim: str) -> tuple[NDArray[np.float64], ...]:
    """Return lower end, median and upper end of the central interval, each (coefficients,)."""
    over = [d for d in draws.dims if d != dim]
    quantiles = draws.quantile([0.5 - prob / 2, 0.5, 0.5 + prob / 2], dim=over).transpose(
        "quantile", dim
    )
    return tuple(np.asarray(quantiles, dtype=float))
