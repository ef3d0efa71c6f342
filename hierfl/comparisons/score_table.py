"""The table of a study: means ± sds over seeds, bold where no t-test tells them from the best mean."""

from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import ttest_rel

from hierfl.comparisons.result_files import costs_of, results, study_of
from hierfl.comparisons.study_file import Study, StudyEntry

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
    """Return the table of a study, a row for each method, bold as **...**, with seeds that failed."""
    diverged, ran = costs.groupby("method")["diverged"].sum(), sorted(costs["seed"].unique())
    cells = costs.groupby("method").size()
    labels = [entry.label for entry in study.methods]
    shown = pd.DataFrame(index=pd.Index(labels, name="method"))
    for column in columns(scores, study.evaluation.metric):
        values = by_seed(scores, column, study.evaluation.weighting)
        values = values.reindex(columns=ran)  # one of which every run diverged has no score
        lost = (cells - values.notna().sum(axis=1)).combine_first(diverged)
        bold = best(column.merit(values))
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
    means = costs[~costs["diverged"]].groupby("method").mean(numeric_only=True)
    for name, (heading, form) in SHOWN_COSTS.items() if study.costs else ():
        if name in means and means[name].notna().any():
            own = means[name].reindex(shown.index)
            shown[heading] = ["" if np.isnan(value) else form.format(value) for value in own]
    return shown


def _put_published(
    shown: pd.DataFrame, study: Study, column: "ScoreColumn", values: pd.DataFrame
) -> None:
    """Add the published numbers of a column, and our differences from them, where there are any."""
    metric = beside(study, column)
    if metric is None:
        return
    papers = [published(study, entry, column.score, metric) for entry in study.methods]
    if all(value is None for value in papers):
        return
    means = [_mean(values, str(label)) for label in shown.index]
    shown[f"published {column.name}, %"] = [
        "" if value is None else f"{value:.2f}" for value in papers
    ]
    shown[f"difference of {column.name}"] = [
        "" if value is None or np.isnan(mean) else f"{mean - value:+.2f}"
        for value, mean in zip(papers, means, strict=True)
    ]


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


def beside(study: Study, column: "ScoreColumn") -> str | None:
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
    far = []
    for column in columns(scores, study.evaluation.metric):
        metric = beside(study, column)
        if metric is None:
            continue
        values = by_seed(scores, column, study.evaluation.weighting)
        for entry in study.methods:
            paper, ours = published(study, entry, column.score, metric), _mean(values, entry.label)
            if paper is not None and abs(ours - paper) > FAR:
                far.append(f"{entry.label} {column.name} {ours - paper:+.1f}")
    return far


LEVEL, MIN_SEEDS = 0.05, 3  # of the paired test: its level, and the seeds that it needs
DIVERGED = 1e6  # a score of this size is of a run that diverged, though its numbers are finite
SMALLER_IS_BETTER = ("distance", "calibration_error")
ALWAYS_SHOWN = ("auroc", "distance", "width", "calibration_error")  # whatever the study's metric is


@dataclass(frozen=True)
class ScoreColumn:
    """A column of scores; `adapted` counts rounds of new clients, None: of participating clients."""

    score: str
    clients: str
    test: str
    metric: str
    adapted: int | None = None

    @property
    def heading(self) -> str:
        """Name and unit of the column, such as "P, %" or "G of new clients, nats"."""
        headings = {
            "auroc": f"AUROC of entropy, {self.test.replace('_', ' ')}",
            "distance": "distance of G from least squares",
            "width": "sd of P, of the exact one",
            "calibration_error": f"calibration error of {self.score}, %",
            "balanced_accuracy": f"balanced {self.name}, %",
            "explained": f"explained, {self.name}, %",
            "log_score": f"{self.name}, nats",
        }
        return headings.get(self.metric, f"{self.name}, %")

    def merit(self, values: pd.DataFrame) -> pd.DataFrame:
        """Return the values as numbers of which the largest is the best; a width is best at 1."""
        if self.metric == "width":
            return -values.map(np.log).abs()
        return -values if self.metric in SMALLER_IS_BETTER else values

    @property
    def name(self) -> str:
        """Name of the column, such as "P of new clients after 2 rounds"."""
        who = "" if self.clients == "participating" else " of new clients"
        after = f" after {self.adapted} round{'s' * (self.adapted > 1)}" if self.adapted else ""
        rows = "" if self.test == "local" else " on all clients' rows"
        return f"{self.score}{who}{after}{rows}"


def columns(scores: pd.DataFrame, metric: str) -> list[ScoreColumn]:
    """Return the columns of a table: scores by the study's metric, P's log score, and the rest."""
    keys = ["score", "clients", "test", "metric", "adapted"]
    every = dict.fromkeys(
        ScoreColumn(score, clients, test, of, adapted if clients == "new" else None)
        for score, clients, test, of, adapted in scores[keys].drop_duplicates().to_numpy()
    )
    served = ScoreColumn("P", "participating", "local", "log_score")
    shown = [c for c in every if c.metric in (metric, *ALWAYS_SHOWN) or c == served]
    order = {metric: 0, "participating": 0, "local": 0, "P": 0, "P+FT": 1, "G": 2}

    def place(column: ScoreColumn) -> list[int]:
        fields = (column.metric, column.clients, column.test, column.score)
        return [*(order.get(v, 1) for v in fields), column.adapted or 0]

    return sorted(shown, key=place)


def by_seed(scores: pd.DataFrame, column: ScoreColumn, weighting: str) -> pd.DataFrame:
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
    equals = {top}
    if whole.shape[1] < MIN_SEEDS:
        return equals
    for name, row in whole.iterrows():
        gaps = row.to_numpy() - whole.loc[top].to_numpy()
        if np.ptp(gaps) <= 1e-9 * abs(gaps).max():
            equal = bool(gaps[0] == 0.0)
        else:
            equal = float(ttest_rel(row, whole.loc[top]).pvalue) >= LEVEL
        if equal:
            equals.add(str(name))
    return equals


PUBLISHED = Path(__file__).with_name("published.csv")


@cache
def _all_published() -> pd.DataFrame:
    return pd.read_csv(PUBLISHED, dtype={"std": str})


def published(
    study: Study, entry: StudyEntry, score: str, metric: str | None = None
) -> float | None:
    """Return the published number beside a score, in %, or None; `metric` defaults to the paper's."""
    if study.published is None or score not in entry.published:
        return None
    method, variant, *own_metric = entry.published[score]
    metric = (*own_metric, metric)[0]
    numbers, where = _all_published(), study.published
    rows = numbers[
        (numbers["paper"] == where.paper)
        & (numbers["dataset"] == where.dataset)
        & (numbers["method"] == method)
        & (numbers["variant"] == variant)
        & (numbers["metric"] == (metric or where.metric))
        & ((where.classes is None) | (numbers["classes_per_client"] == where.classes))
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
