"""A map of clients: similar clients lie close together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hierfl.plots.style import BAND, POINTS, mark_areas, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]


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
    at, share = _components((values - values.mean(0))[:, sd > 0.0] / scale[sd > 0.0])
    count = np.ones(len(names)) if rows is None else np.asarray(rows, dtype=float)
    size = mark_areas(count, largest=110.0)
    ax.axhline(0.0, color=BAND, linewidth=0.8, zorder=0)
    ax.axvline(0.0, color=BAND, linewidth=0.8, zorder=0)
    ax.scatter(at[:, 0], at[:, 1], s=size, alpha=0.85, linewidth=0.5, zorder=2, **POINTS)
    _name_outermost(ax, at, names, size)
    ax.margins(0.16)
    ax.set(xlabel=f"first component ({share[0]:.0%})", ylabel=f"second component ({share[1]:.0%})")
    ax.set_xticks([])
    ax.set_yticks([])
    return plain(ax)


def _components(centered: Floats) -> tuple[Floats, Floats]:
    """Return the first two principal components (N, 2) and their shares of variance."""
    left, singular, _ = np.linalg.svd(centered, full_matrices=False)
    at, share, kept = np.zeros((len(centered), 2)), np.zeros(2), min(2, len(singular))
    at[:, :kept] = left[:, :kept] * singular[:kept]
    # the sign of a component is arbitrary: make its largest entry positive
    at *= np.where(np.abs(at).max(0) == at.max(0), 1.0, -1.0)
    share[:kept] = (singular**2 / (singular**2).sum())[:kept]
    return at, share


def _name_outermost(ax: Axes, at: Floats, names: Sequence[str], size: Floats) -> None:
    """Name all clients if there are up to 12, otherwise the 8 farthest from the origin."""
    far = np.argsort(-np.linalg.norm(at, axis=1))[: len(names) if len(names) <= 12 else 8]
    for i in far:
        style: dict[str, Any] = {"ha": "center", "fontsize": "small"}
        above = (0, 2.0 + size[i] ** 0.5 / 2)
        ax.annotate(names[i], at[i], xytext=above, textcoords="offset points", **style)
