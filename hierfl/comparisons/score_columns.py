"""Columns of a study's table: their scores by method and seed, and which are best."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import ttest_rel

LEVEL, MIN_SEEDS = 0.05, 3  # of the paired test: its level, and the seeds that it needs
DIVERGED = 1e6  # a score of this size is of a run that diverged, though its numbers are finite
SMALLER_IS_BETTER = ("distance", "calibration_error")
ALWAYS_SHOWN = ("auroc", "distance", "calibration_error")  # whatever the study's metric is


@dataclass(frozen=True)
class Column:
    """One column of scores, of the fields of `Score`.

    `adapted` counts the rounds that new clients have adapted; None: of participating clients.
    """

    score: str
    clients: str
    test: str
    metric: str
    adapted: int | None = None

    @property
    def heading(self) -> str:
        """Name and unit of the column, such as "P, %" or "G of new clients, nats"."""
        if self.metric == "auroc":
            return f"AUROC of entropy, {self.test.replace('_', ' ')}"
        if self.metric == "distance":
            return "distance of G from least squares"
        if self.metric == "calibration_error":
            return f"calibration error of {self.score}, %"
        kind = {"balanced_accuracy": "balanced ", "explained": "explained, "}.get(self.metric, "")
        return f"{kind}{self.name}, {'nats' if self.metric == 'log_score' else '%'}"

    @property
    def sign(self) -> float:
        """1 where larger is better, and -1 where smaller is."""
        return -1.0 if self.metric in SMALLER_IS_BETTER else 1.0

    @property
    def name(self) -> str:
        """Name of the column, such as "P of new clients after 2 rounds"."""
        who = "" if self.clients == "participating" else " of new clients"
        after = f" after {self.adapted} round{'s' * (self.adapted > 1)}" if self.adapted else ""
        rows = "" if self.test == "local" else " on all clients' rows"
        return f"{self.score}{who}{after}{rows}"


def columns(scores: pd.DataFrame, metric: str) -> list[Column]:
    """Return the columns of a table: scores by the study's metric, P's log score, and the rest."""
    keys = ["score", "clients", "test", "metric", "adapted"]
    every = dict.fromkeys(
        Column(score, clients, test, of, adapted if clients == "new" else None)
        for score, clients, test, of, adapted in scores[keys].drop_duplicates().to_numpy()
    )
    served = Column("P", "participating", "local", "log_score")
    found = [c for c in every if c.metric in (metric, *ALWAYS_SHOWN) or c == served]
    order = {metric: 0, "participating": 0, "local": 0, "P": 0, "P+FT": 1, "G": 2}

    def place(column: Column) -> list[int]:
        named = (column.metric, column.clients, column.test, column.score)
        return [*(order.get(v, 1) for v in named), column.adapted or 0]

    return sorted(found, key=place)


def by_seed(scores: pd.DataFrame, column: Column, weighting: str) -> pd.DataFrame:
    """Return one column's numbers, (methods, seeds); NaN where a run diverged."""
    own = scores[
        (scores["score"] == column.score)
        & (scores["clients"] == column.clients)
        & (scores["test"] == column.test)
        & (scores["metric"] == column.metric)
        & (scores["weighting"] == weighting)
        & ((scores["adapted"] == column.adapted) | (column.adapted is None))
    ]
    values = own.pivot(index="method", columns="seed", values="value")
    return values.mask(values.abs() >= DIVERGED)


def best(values: pd.DataFrame) -> set[str]:
    """Return the method of the largest mean, and those that a paired t-test cannot tell from it."""
    whole = values.dropna()
    if whole.empty:
        return set()
    top = str(whole.mean(axis=1).idxmax())
    found = {top}
    if whole.shape[1] < MIN_SEEDS:
        return found
    for name, row in whole.iterrows():
        apart = row.to_numpy() - whole.loc[top].to_numpy()
        if np.ptp(apart) <= 1e-9 * abs(apart).max():
            equal = bool(apart[0] == 0.0)
        else:
            equal = float(ttest_rel(row, whole.loc[top]).pvalue) >= LEVEL
        if equal:
            found.add(str(name))
    return found
