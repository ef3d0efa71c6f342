"""Draws of an answer, labeled, and their means, sds and intervals as columns of a frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from hierfl.core.intervals import percent, tails
from hierfl.core.tables import Shown

if TYPE_CHECKING:
    from xarray import DataArray

STATISTICS = ("mean", "sd", "low", "high")
Floats = NDArray[np.float64]


def ends(prob: float) -> str:
    """Return what `low` and `high` are, as a sentence."""
    return f"low and high are the ends of the {percent(prob)} interval."


def with_intervals(found: Any) -> Shown:
    """Return how a result with a title and a frame of intervals is shown."""
    return Shown(found.title, found.frame, ends(found.prob))


def statistics(draws: Tensor, prob: float, *, prefix: str = "") -> dict[str, Floats]:
    """Return mean, sd and interval of each entry of draws (S, ...), as columns."""
    values = draws.detach().double().numpy().reshape(len(draws), -1)
    low, high = np.quantile(values, tails(prob), axis=0)
    found = (values.mean(0), values.std(0, ddof=1), low, high)
    return {f"{prefix}{name}": value for name, value in zip(STATISTICS, found, strict=True)}


def share_above(draws: Tensor, edge: float) -> Floats:
    """Return the share of draws above an edge, of each entry; draws on it count half."""
    values = draws.detach().double().numpy().reshape(len(draws), -1)
    found: Floats = (values > edge).mean(0) + 0.5 * (values == edge).mean(0)
    return found


def labeled(draws: Tensor, dims: Mapping[str, Sequence[Any]], name: str) -> DataArray:
    """Return draws (S, ...) with a dimension for each entry of `dims`, and ArviZ's `chain` and `draw` before them.

    The dimension of a number without levels, {"level": ("",)}, is left out.
    """
    import xarray  # slow to import

    named = {
        dim: labels for dim, labels in dims.items() if dim != "level" or tuple(labels) != ("",)
    }
    values = draws.detach().double().numpy().reshape(1, len(draws), *map(len, named.values()))
    coords = {"chain": [0], "draw": np.arange(len(draws))}
    coords |= {dim: np.array(list(labels)) for dim, labels in named.items()}
    return xarray.DataArray(values, coords, ["chain", "draw", *named], name=name)


def tabulated(draws: DataArray, prob: float, *, first: Sequence[str] = ()) -> pd.DataFrame:
    """Return a row per entry of labeled draws: its labels, those of `first` in front, and its statistics."""
    import torch

    dims = [str(dim) for dim in draws.dims[2:]]
    places = [at.reshape(-1) for at in np.indices(draws.shape[2:])]
    columns = {dim: draws[dim].to_numpy()[at] for dim, at in zip(dims, places, strict=True)}
    ordered = [*first, *(dim for dim in dims if dim not in first)]
    found = {dim: columns[dim] for dim in ordered if dim in columns}
    return pd.DataFrame({**found, **statistics(torch.as_tensor(draws.to_numpy()[0]), prob)})
