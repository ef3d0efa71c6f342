"""The papers' numbers, of published.csv, that stand beside ours."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from hierfl.comparisons.study_file import Entry, Study

PUBLISHED = Path(__file__).with_name("published.csv")


@cache
def _all_published() -> pd.DataFrame:
    return pd.read_csv(PUBLISHED, dtype={"std": str})


def published(study: Study, entry: Entry, score: str, metric: str | None = None) -> float | None:
    """Return the published number beside a score of a method, in %, or None.

    `metric` is the paper's, by default that of participating clients. A number that the study names
    and published.csv lacks is a ValueError.
    """
    if study.published is None or score not in entry.published:
        return None
    method, variant, *own_metric = entry.published[score]
    metric = (*own_metric, metric)[0]
    known, where = _all_published(), study.published
    rows = known[
        (known["paper"] == where.paper)
        & (known["dataset"] == where.dataset)
        & (known["method"] == method)
        & (known["variant"] == variant)
        & (known["metric"] == (metric or where.metric))
        & ((where.classes is None) | (known["classes_per_client"] == where.classes))
    ]
    for table_name, model in product(_several(where.table), _several(where.model)):
        own = rows[(rows["table"] == table_name) & (rows["model"] == model)]
        if len(own) > 1:
            raise ValueError(f"published.csv has {len(own)} rows of {where}, {method}, {variant}")
        if len(own) == 1:
            value = float(own["value"].iloc[0])
            return None if np.isnan(value) else value  # the paper has a dash
    raise ValueError(f"published.csv has no row of {where}, {method}, {variant}")


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
