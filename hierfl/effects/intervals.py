"""Means, sds and 90 % intervals of draws, as columns of a frame."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hierfl.core.tables import Shown

LOW, HIGH = 0.05, 0.95  # of the draws: the 90 % interval
STATISTICS = ("mean", "sd", "low", "high")
Floats = NDArray[np.float64]


def with_intervals(found: Any) -> Shown:
    """Return how a result with a title and a frame of intervals is shown."""
    return Shown(found.title, found.frame, "low and high are the ends of the 90 % interval.")


def statistics(draws: Tensor, *, prefix: str = "") -> dict[str, Floats]:
    """Return mean, sd and 90 % interval of each entry of draws (S, ...), as columns."""
    values = draws.detach().double().numpy().reshape(len(draws), -1)
    low, high = np.quantile(values, [LOW, HIGH], axis=0)
    found = (values.mean(0), values.std(0, ddof=1), low, high)
    return {f"{prefix}{name}": value for name, value in zip(STATISTICS, found, strict=True)}


def share_above(draws: Tensor, edge: float) -> Floats:
    """Return the share of draws above an edge, of each entry; draws on it count half."""
    values = draws.detach().double().numpy().reshape(len(draws), -1)
    found: Floats = (values > edge).mean(0) + 0.5 * (values == edge).mean(0)
    return found
