"""The main figure of a study: scores beside published ones, and curves over rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hierfl.comparisons.part_figures import figures
from hierfl.comparisons.result_files import ALONG, curves_of, results, study_of
from hierfl.comparisons.score_table import Column, by_seed, published
from hierfl.comparisons.study_file import Study

COLORS = {"P": "#1f6f8b", "P+FT": "#6aa84f", "G": "#e08e45"}
SHIFTS = {"P": 0.2, "P+FT": 0.0, "G": -0.2}  # of the scores of a method, in rows
STYLES = ("-", "--", ":", "-.")  # one for each ten methods, which have ten colors


def draw(out: Path, file: Path | None = None) -> list[Path]:
    """Draw all figures of the study whose results are in a folder, and return their files.

    The main figure goes to `file`, by default figure.png in the folder; the names of the others
    extend its name.
    """
    first = file or out / "figure.png"
    drawn = {first: figure(out)}
    drawn |= {first.with_stem(f"{first.stem}-{n}"): own for n, own in figures(out).items()}
    for path, own in drawn.items():
        own.savefig(path, dpi=150)
    return list(drawn)


def figure(out: Path) -> Figure:
    """Return the main figure of the study whose results are in a folder."""
    study, scores, curves = study_of(out), results(out), curves_of(out)
    shown = [] if curves.empty else [None, *(name for name in ALONG if name in curves)]
    height = 1.2 + 0.32 * len(study.methods)
    drawn = Figure(figsize=(7.0 + 5.0 * len(shown), max(3.5, height)), layout="constrained")
    axes = drawn.subplots(1, 1 + len(shown), squeeze=False)[0]
    bars(axes[0], study, scores)
    for panel, name in zip(axes[1:], shown, strict=True):
        lines(panel, study, curves, name)
    if shown:
        axes[-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    drawn.suptitle(study.title)
    return drawn


def bars(axes: Axes, study: Study, scores: pd.DataFrame) -> None:
    """Draw accuracy by method, mean and sd over seeds; a published one is a hollow diamond."""
    labels = [entry.label for entry in study.methods]
    place = np.arange(len(labels))[::-1]
    metric, weighting = study.evaluation.metric, study.evaluation.weighting
    measured = [score for score in SHIFTS if (scores["score"] == score).any()]
    for score, shift in ((score, SHIFTS[score]) for score in measured):
        column = Column(score, "participating", "local", metric)
        values = by_seed(scores, column, weighting)
        own = values.reindex(labels)
        axes.errorbar(
            own.mean(axis=1),
            place + shift,
            xerr=own.std(axis=1, ddof=1).fillna(0.0),
            fmt="o",
            capsize=2,
            color=COLORS[score],
            label=score,
        )
        known = [published(study, entry, score) for entry in study.methods]
        at = [(v, p + shift) for v, p in zip(known, place, strict=True) if v is not None]
        if at:
            axes.scatter(
                *zip(*at, strict=True),
                marker="D",
                facecolors="none",
                edgecolors=COLORS[score],
                label=f"{score}, published",
            )
    axes.set_yticks(place, labels)
    axes.set_xlabel(f"{metric.replace('_', ' ')}, % of {weighting}")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="best")


def lines(axes: Axes, study: Study, curves: pd.DataFrame, name: str | None = None) -> None:
    """Draw means over seeds by round: a column by name, or P, or G of methods that tune for P."""
    metric = f"{study.evaluation.metric.replace('_', ' ')}, %"
    for place, entry in enumerate(study.methods):
        own = curves[curves["method"] == entry.label]
        if own.empty:
            continue
        score = name or ("P" if own["P"].notna().any() else "G")
        mean = own.groupby("round")[score].mean()
        label = entry.label if name else f"{entry.label} ({score})"
        axes.plot(mean.index, mean, ls=STYLES[place // 10 % len(STYLES)], label=label)
    words = {"P, new": f"P of new clients, {metric}", "coherence": "coherence, -log det"}
    words |= {"distance": "distance of G from least squares"}
    axes.set_xlabel("round")
    axes.set_ylabel(words[name] if name else metric)
    if name == "distance":
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
