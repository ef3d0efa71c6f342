"""Clients' answers about their rows, added up: means, sds, quantiles and their bounds, shares of levels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hierfl.formulas.columns import ordered, refuse_similar
from hierfl.formulas.table_answers import OTHERS, LevelsAnswer, NumbersAnswer

QUARTILES = {"q25": 0.25, "median": 0.5, "q75": 0.75}
Floats = NDArray[np.float64]


def pooled_levels(
    column: str, parts: Sequence[LevelsAnswer], about: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return a row per level: how many rows have it, and their share."""
    orders = {one.declared for one in parts if one.declared}
    seen = {level for one in parts for level in one.counts}
    refuse_similar(seen, f"column '{column}'")
    names = [*max(orders, key=len)] if orders else []
    names += [level for level in ordered(seen) if level not in names]
    lines = []
    for level in names:
        count = sum(one.counts.get(level, 0) for one in parts)
        lines.append({**about, "level": level, "count": count, "share": count / about["n"]})
    others = [one.others for one in parts if one.others]
    if others:
        count = min(others) if min(others) < 0 else sum(others)
        share = math.nan if count < 0 else count / about["n"]
        lines.append({**about, "level": OTHERS, "count": count, "share": share})
    return lines


def pooled_numbers(parts: Sequence[NumbersAnswer], least: int) -> dict[str, float]:
    """Return mean, sd and quartiles of all clients' values, with bounds of the quartiles."""
    rows = np.array([one.rows for one in parts], dtype=np.float64)
    total = rows.sum()
    if not total:
        return {}
    means, sds = (np.array([getattr(one, of) for one in parts]) for of in ("mean", "sd"))
    mean = float(rows @ means / total)
    squares = (rows - 1.0) @ sds**2 + rows @ (means - mean) ** 2
    found = {"mean": mean, "sd": math.sqrt(squares / (total - 1.0)) if total > 1.0 else math.nan}
    for name, share in QUARTILES.items():
        at = _exact(parts, share) if least == 1 else _bounded(parts, share, least)
        found |= dict(zip((name, f"{name}_low", f"{name}_high"), at, strict=True))
    return found


# ------------------------------------------------------------ quantiles
def _exact(parts: Sequence[NumbersAnswer], share: float) -> tuple[float, float, float]:
    """Return a quantile of values that are all known, as pandas has it."""
    every = np.concatenate([np.repeat(one.ends, np.diff([0, *one.below])) for one in parts])
    at = float(np.quantile(every, share))
    return at, at, at


def _bounded(
    parts: Sequence[NumbersAnswer], share: float, least: int
) -> tuple[float, float, float]:
    """Return a quantile by interpolation, and the ends between which it lies whatever the values are."""
    points = np.array(sorted({end for one in parts for end in one.ends}))
    if not len(points):
        return math.nan, -math.inf, math.inf
    middle, low, high = np.zeros(len(points)), np.zeros(len(points)), np.zeros(len(points))
    for one in parts:
        below = np.array([0, *one.below, one.rows], dtype=np.float64)
        outside = 0.5 * (below[:-1] + below[1:])  # the middle of the open ranges
        inside = {"left": outside[0], "right": outside[-1]}
        middle += np.interp(points, one.ends, one.below, **inside) if one.ends else outside[0]
        low += below[np.searchsorted(one.ends, points, side="right")]
        high += below[np.searchsorted(one.ends, points, side="left") + 1]
    wanted = share * sum(one.rows for one in parts)
    slack = 0.5 * least * len(parts)  # by which counts are rounded
    upper = points[low - slack >= wanted + share * slack]
    lower = points[high + slack < wanted - share * slack]
    ends = float(lower.max(initial=-math.inf)), float(upper.min(initial=math.inf))
    at = float(np.interp(wanted, middle, points)) if np.isfinite(ends).all() else math.nan
    return at, *ends
