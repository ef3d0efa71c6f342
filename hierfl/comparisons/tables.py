"""Tables of a study's results, with published numbers beside ours, as Markdown or LaTeX.

Means ± sds (ddof 1) over seeds. The best mean of a column is bold, and so is each that a paired t-test over seeds does
not tell from it (two-sided, 5 %); with one or two seeds, where that test tells hardly anything, the best alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import ttest_rel

from hierfl.comparisons.published_numbers import published
from hierfl.comparisons.result_files import COSTS, RESULTS, TUNED, study_of
from hierfl.comparisons.study_file import Study
from hierfl.studies.baseline_methods import baseline

LEVEL, FEWEST = 0.05, 3  # of the paired test: its level, and seeds from which on it is made
DIVERGED = 1e6  # a score of this size is of a run that diverged, though its numbers are finite
FAR = 1.5  # points from a published number from which a difference is named
LATEX = {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "±": r"$\pm$"}


@dataclass(frozen=True)
class Column:
    """One column of scores: P or G of some clients on some rows, of one metric.

    Args:
        score: "P", "P+FT" or "G".
        clients: "participating" or "new".
        test: "local" or "global".
        metric: as in `measures.Score`.
        adapted: rounds that new clients have adapted; None: the column is of participating clients.
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
            return f"AUROC of entropy, {self.test}"
        if self.metric == "distance":
            return "distance of G from least squares"
        kind = {"balanced_accuracy": "balanced ", "explained": "explained, "}.get(self.metric, "")
        return f"{kind}{self.name}, {'nats' if self.metric == 'log_score' else '%'}"

    @property
    def sign(self) -> float:
        """1 where larger is better, and -1 where smaller is."""
        return -1.0 if self.metric == "distance" else 1.0

    @property
    def name(self) -> str:
        """Name of the column, such as "P of new clients after 2 rounds"."""
        who = "" if self.clients == "participating" else " of new clients"
        after = f" after {self.adapted} round{'s' * (self.adapted > 1)}" if self.adapted else ""
        rows = "" if self.test == "local" else " on all clients' rows"
        return f"{self.score}{who}{after}{rows}"


def results(out: Path) -> pd.DataFrame:
    """Return results.csv of a study's folder."""
    return pd.read_csv(out / RESULTS)


def table_of(out: Path) -> pd.DataFrame:
    """Return the table of the study whose results are in a folder."""
    return table(study_of(out), results(out), pd.read_csv(out / COSTS))


def columns(scores: pd.DataFrame, metric: str) -> list[Column]:
    """Return the columns of a table: all scores by the study's metric, the log score of P, and what has no other."""
    keys = ["score", "clients", "test", "metric", "adapted"]
    every = {
        Column(score, clients, test, of, adapted if clients == "new" else None)
        for score, clients, test, of, adapted in scores[keys].drop_duplicates().to_numpy()
    }
    served = Column("P", "participating", "local", "log_score")
    found = [c for c in every if c.metric in (metric, "auroc", "distance") or c == served]
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
    """Return the method of the largest mean, and those that a paired t-test over seeds does not tell from it."""
    whole = values.dropna()
    if whole.empty:
        return set()
    top = str(whole.mean(axis=1).idxmax())
    found = {top}
    if whole.shape[1] >= FEWEST:
        for name, row in whole.iterrows():
            apart = row.to_numpy() - whole.loc[top].to_numpy()
            if np.ptp(apart) <= 1e-9 * abs(apart).max():
                alike = bool(apart[0] == 0.0)
            else:
                alike = float(ttest_rel(row, whole.loc[top]).pvalue) >= LEVEL
            if alike:
                found.add(str(name))
    return found


def table(study: Study, scores: pd.DataFrame, costs: pd.DataFrame) -> pd.DataFrame:
    """Return the table of a study: a row for each method, bold as **...**.

    A mean without the seeds that diverged, or failed and so have no score, says so; a method that was not run has
    empty cells. A score of 1e6 or more, of either sign, counts as diverged.

    Args:
        study: whose methods give the order, and whose weighting is shown.
        scores: as `results` returns them.
        costs: costs.csv of the same folder, which knows what diverged.
    """
    diverged, ran = costs.groupby("method")["diverged"].sum(), sorted(costs["seed"].unique())
    cells = costs.groupby("method").size()
    shown = pd.DataFrame(index=[entry.label for entry in study.methods])
    shown.index.name = "method"
    metric = study.evaluation.metric
    for column in columns(scores, metric):
        values = by_seed(scores, column, study.evaluation.weighting)
        values = values.reindex(columns=ran)  # one of which every run diverged has no score
        lost = (cells - values.notna().sum(axis=1)).combine_first(diverged)
        bold, form = best(column.sign * values), "{:.2f}" if column.metric == metric else "{:.3f}"
        shown[column.heading] = [
            _cell(
                values,
                label,
                bold,
                form,
                int(lost.get(label, 0)),
                len(study.run.seeds) - int(cells.get(label, 0)),
            )
            for label in shown.index
        ]
        if (of_paper := beside(study, column)) is not None:
            known = [published(study, entry, column.score, of_paper) for entry in study.methods]
            if any(value is not None for value in known):
                means = [_mean(values, label) for label in shown.index]
                shown[f"published {column.name}, %"] = [
                    "" if value is None else f"{value:.2f}" for value in known
                ]
                shown[f"difference of {column.name}"] = [
                    "" if value is None or np.isnan(mean) else f"{mean - value:+.2f}"
                    for value, mean in zip(known, means, strict=True)
                ]
    return shown


def _mean(values: pd.DataFrame, label: str) -> float:
    return float(values.loc[label].mean()) if label in values.index else float("nan")


def _cell(
    values: pd.DataFrame, label: str, bold: set[str], form: str, diverged: int, missing: int
) -> str:
    own = values.loc[label].dropna() if label in values.index else pd.Series(dtype=float)
    if own.empty:
        return "diverged" if diverged else ""
    text = form.format(own.mean())
    if len(own) > 1:
        text += f" ± {form.format(own.std(ddof=1))}"
    counts = {"diverged": diverged, "not run": missing}
    if left_out := [f"{count} {why}" for why, count in counts.items() if count]:
        text += f" (of {len(own) + diverged + missing} seeds {', '.join(left_out)})"
    return f"**{text}**" if label in bold else text


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


def caption(study: Study) -> str:
    """Return what the numbers of a table are, in a sentence or two."""
    run, seen = study.run, study.evaluation
    k = seen.last_rounds
    rounds = "of the last round" if k == 1 else f"are means over the last {k} rounds"
    seeds = len(run.seeds)
    if k > 1 and run.cohort and any(baseline(entry.name).everyone for entry in study.methods):
        rounds += " (the same share of the run of a method that takes fewer)"
    if seen.round_of_all:
        rounds += ", P's of one more in which all clients train"
    return (
        f"{study.title}. {run.rounds} rounds; scores {rounds}, every {seen.weighting[:-1]} counts the same; "
        f"mean ± sd over {seeds} seed{'s' * (seeds > 1)}. Bold: the best"
        + (", and what a paired t-test does not tell from it (5 %)." if seeds >= FEWEST else ".")
    )


def tuned(out: Path) -> str:
    """Return the options that were chosen, in a sentence; "" where nothing was tuned."""
    trials = pd.read_csv(out / TUNED)
    if trials.empty:
        return ""
    rows = trials[trials["chosen"]]
    by_log_score = study_of(out).tuning.metric == "log_score"
    form = "{} {} ({:.3f} nats)" if by_log_score else "{} {} ({:.1f} %)"
    each = [
        form.format(m, o, s)
        for m, o, s in zip(rows["method"], rows["options"], rows["score"], strict=True)
    ]
    return (
        f"Chosen on rows or clients kept from the fit, with their score there: {'; '.join(each)}."
    )


def markdown(out: Path) -> str:
    """Return a study's table as Markdown, with its caption and what was chosen."""
    study, scores = study_of(out), results(out)
    frame = table_of(out).reset_index()
    head = [str(name) for name in frame.columns]
    rule = ["---", *("---:" for _ in head[1:])]
    lines = [f"| {' | '.join(row)} |" for row in (head, rule, *frame.to_numpy().tolist())]
    far = differences(study, scores)
    under = [
        *([f"More than {FAR} points from the published: {', '.join(far)}."] if far else []),
        *([tuned(out)] if study.tuning.rounds else []),
        *study.notes,
    ]
    return (
        "\n".join([caption(study), "", *lines, "", *(f"* {line}" for line in under)]).rstrip()
        + "\n"
    )


def latex(out: Path) -> str:
    """Return a study's table as LaTeX, for booktabs."""
    study = study_of(out)
    frame = table_of(out).reset_index()
    rows = [
        [_as_latex(value) for value in row]
        for row in (list(frame.columns), *frame.to_numpy().tolist())
    ]
    head, *body = [" & ".join(row) + r" \\" for row in rows]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_as_latex(caption(study))}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(frame.columns) - 1)}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _as_latex(text: str) -> str:
    bold = text.startswith("**")
    plain = "".join(LATEX.get(c, c) for c in text.strip("*"))
    return rf"\textbf{{{plain}}}" if bold else plain
