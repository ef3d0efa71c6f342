"""The table of a study's results, with published numbers beside ours.

Means ± sds (ddof 1) over seeds. The best mean of a column is bold, and so is each that a paired
t-test over seeds does not tell from it (two-sided, 5 %); with one or two seeds, where that test
tells hardly anything, the best alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from hierfl.comparisons.published_numbers import published
from hierfl.comparisons.result_files import costs_of, results, study_of
from hierfl.comparisons.score_columns import Column, best, by_seed, columns
from hierfl.comparisons.study_file import Study

FAR = 1.5  # points from a published number from which a difference is named
# column of costs.csv -> heading, and form of its mean
SHOWN_COSTS = {
    "kb_down": ("kB down", "{:.1f}"),
    "kb_up": ("kB up", "{:.1f}"),
    "kb_kept": ("kB kept", "{:.1f}"),
    "round_seconds": ("s a round", "{:.3f}"),
    "evaluations": ("evaluations", "{:.0f}"),
}


def table_of(out: Path) -> pd.DataFrame:
    """Return the table of the study whose results are in a folder."""
    return table(study_of(out), results(out), costs_of(out))


def table(study: Study, scores: pd.DataFrame, costs: pd.DataFrame) -> pd.DataFrame:
    """Return the table of a study: a row for each method, bold as **...**.

    A cell says how many of its seeds diverged (a score of 1e6 or more, of either sign) or failed. A
    method that was not run has empty cells.
    """
    diverged, ran = costs.groupby("method")["diverged"].sum(), sorted(costs["seed"].unique())
    cells = costs.groupby("method").size()
    labels = [entry.label for entry in study.methods]
    shown = pd.DataFrame(index=pd.Index(labels, name="method"))
    for column in columns(scores, study.evaluation.metric):
        values = by_seed(scores, column, study.evaluation.weighting)
        values = values.reindex(columns=ran)  # one of which every run diverged has no score
        lost = (cells - values.notna().sum(axis=1)).combine_first(diverged)
        bold = best(column.sign * values)
        form = "{:.2f}" if column.heading.endswith("%") else "{:.3f}"
        shown[column.heading] = [
            _cell(
                values.loc[label].dropna() if label in values.index else pd.Series(dtype=float),
                form,
                bold=label in bold,
                diverged=int(lost.get(label, 0)),
                missing=len(study.run.seeds) - int(cells.get(label, 0)),
            )
            for label in labels
        ]
        _put_published(shown, study, column, values)
    return _with_costs(shown, costs) if study.costs else shown


def _put_published(shown: pd.DataFrame, study: Study, column: Column, values: pd.DataFrame) -> None:
    """Add the published numbers of a column, and our differences from them, where there are any."""
    metric = beside(study, column)
    if metric is None:
        return
    known = [published(study, entry, column.score, metric) for entry in study.methods]
    if all(value is None for value in known):
        return
    means = [_mean(values, str(label)) for label in shown.index]
    shown[f"published {column.name}, %"] = [
        "" if value is None else f"{value:.2f}" for value in known
    ]
    shown[f"difference of {column.name}"] = [
        "" if value is None or np.isnan(mean) else f"{mean - value:+.2f}"
        for value, mean in zip(known, means, strict=True)
    ]


def _with_costs(shown: pd.DataFrame, costs: pd.DataFrame) -> pd.DataFrame:
    """Add the mean costs over seeds that did not diverge."""
    means = costs[~costs["diverged"]].groupby("method").mean(numeric_only=True)
    for name, (heading, form) in SHOWN_COSTS.items():
        if name in means and means[name].notna().any():
            own = means[name].reindex(shown.index)
            shown[heading] = ["" if np.isnan(value) else form.format(value) for value in own]
    return shown


def _mean(values: pd.DataFrame, label: str) -> float:
    return float(values.loc[label].mean()) if label in values.index else float("nan")


def _cell(own: pd.Series, form: str, *, bold: bool, diverged: int, missing: int) -> str:
    """Return mean ± sd of one method, with the seeds that are left out."""
    if own.empty:
        return "diverged" if diverged else ""
    text = form.format(own.mean())
    if len(own) > 1:
        text += f" ± {form.format(own.std(ddof=1))}"
    counts = {"diverged": diverged, "not run": missing}
    if left_out := [f"{count} {why}" for why, count in counts.items() if count]:
        text += f" (of {len(own) + diverged + missing} seeds {', '.join(left_out)})"
    return f"**{text}**" if bold else text


def beside(study: Study, column: Column) -> str | None:
    """Return the paper's metric that stands beside a column; None: nothing does."""
    local = column.test == "local" and column.metric == study.evaluation.metric
    if study.published is None or not local:
        return None
    if column.clients == "participating":
        return study.published.metric
    last = column.adapted in (0, study.evaluation.join_rounds[-1])
    return study.published.new_metric or None if last else None


def differences(study: Study, scores: pd.DataFrame) -> list[str]:
    """Return which of our means are farther than 1.5 points from the published ones."""
    found = []
    for column in columns(scores, study.evaluation.metric):
        metric = beside(study, column)
        if metric is None:
            continue
        values = by_seed(scores, column, study.evaluation.weighting)
        for entry in study.methods:
            known, ours = published(study, entry, column.score, metric), _mean(values, entry.label)
            if known is not None and abs(ours - known) > FAR:
                found.append(f"{entry.label} {column.name} {ours - known:+.1f}")
    return found
