"""Sampling limits of standardized ratios, of one client or a funnel plot.

Source: Spiegelhalter 2005, Stat. Med. 24:1185, A.1.1; Clopper and Pearson 1934; Garwood 1936.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import scipy  # which loads scipy.stats when it is used
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
# Two-sided probability -> its name: two and three standard errors.
LIMITS = {0.95: "95 %", 0.998: "99.8 %"}


def ratio_interval(
    observed: float, expected: float, trials: float | None, *, prob: float
) -> tuple[float, float]:
    """Return exact limits of observed / expected: Clopper and Pearson's; without `trials` Garwood's."""
    tail = 0.5 - prob / 2
    if trials is None:
        low = scipy.stats.gamma.ppf(tail, observed) if observed else 0.0
        return float(low) / expected, float(
            scipy.stats.gamma.ppf(1 - tail, observed + 1)
        ) / expected
    low = scipy.stats.beta.ppf(tail, observed, trials - observed + 1) if observed else 0.0
    full = observed >= trials
    high = 1.0 if full else scipy.stats.beta.ppf(1 - tail, observed + 1, trials - observed)
    return float(low) * trials / expected, float(high) * trials / expected


def funnel_limits(expected: ArrayLike, rate: float | None, prob: float) -> tuple[Floats, Floats]:
    """Return limits (n,) of observed / expected at ratio 1: binomial, or Poisson for rate None."""
    at = np.asarray(expected, dtype=np.float64)
    fn = _counts(at, rate)
    limits = []
    for p in (0.5 - prob / 2, 0.5 + prob / 2):
        count = fn.ppf(p)
        above, below = fn.cdf(count), fn.cdf(count - 1)
        share = (above - p) / np.maximum(above - below, 1e-300)
        limits.append(np.maximum(count - share, 0.0) / at)
    return limits[0], limits[1]


def funnel_curves(expected: ArrayLike, rate: float | None) -> pd.DataFrame:
    """Return the limits of a funnel plot as curves: `limits`, `expected`, `low` and `high`."""
    events = np.asarray(expected, dtype=np.float64)
    at = np.geomspace(0.8 * events.min(), 1.1 * events.max(), 200)
    curves = []
    for prob, name in LIMITS.items():
        low, high = funnel_limits(at, rate, prob)
        curves.append(pd.DataFrame({"limits": name, "expected": at, "low": low, "high": high}))
    return pd.concat(curves, ignore_index=True)


def _counts(expected: Floats, rate: float | None) -> Any:
    if rate is None:
        return scipy.stats.poisson(expected)
    trials = np.maximum(np.round(expected / rate), 1.0)
    return scipy.stats.binom(trials, np.minimum(expected / trials, 1.0))


def beyond(observed: float, expected: float, rate: float | None) -> str:
    """Return the widest limits that observed / expected exceeds, or "inside"."""
    widest = "inside"
    for prob, name in LIMITS.items():
        low, high = funnel_limits([expected], rate, prob)
        if not low[0] <= observed / expected <= high[0]:
            widest = name
    return widest
