"""Contrasts, under emmeans' name: comparisons of a typical row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import pandas as pd

from hierfl.core.arguments import spelled
from hierfl.core.intervals import PROB
from hierfl.effects.comparisons import Comparison, Comparisons, comparisons
from hierfl.effects.drawn import Fitted
from hierfl.effects.predictor import Scale


@spelled
def contrasts(
    fit: Fitted,
    variable: str,
    *,
    values: Sequence[Any] | None = None,
    kind: Comparison = "difference",
    at: Mapping[str, Any] | None = None,
    client: str | Sequence[str] | None = None,
    scale: Scale = "response",
    prob: float = PROB,
    draws: int = 1000,
    seed: int = 0,
) -> Comparisons:
    """Compare the response between values of one column, the other columns held at typical values.

    It is `comparisons` of a typical row; the column of pairs is `contrast`. No rows are read.

    Args:
        fit: of a `hierfl.formula`.
        variable: a column that the formula reads.
        values: every two of them are compared, the later with the earlier. Default None: all
            levels; of a number its mean, and one sd above it.
        kind: "difference" or "ratio", as `comparison` of `comparisons`.
        at: as in `effects`.
        client: as in `effects`.
        scale: "response" or "link".
        prob: of the interval.
        draws: S, of the posterior.
        seed: of the draws.

    Errors are those of `comparisons`.
    """
    if kind not in get_args(Comparison):
        raise ValueError(f"kind is {kind!r}: it must be 'difference' or 'ratio'")
    found = comparisons(
        fit,
        variable,
        values=values,
        comparison=kind,
        at=at,
        client=client,
        scale=scale,
        prob=prob,
        draws=draws,
        seed=seed,
    )
    return replace(found, frame=as_contrasts(found.frame))


def as_contrasts(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame of comparisons, its pairs named as contrasts."""
    return frame.rename(columns={"comparison": "contrast"})
