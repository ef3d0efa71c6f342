"""Figures of what a study measures besides scores: clients, lines, entropies, losses by class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hierfl import plots
from hierfl.comparisons.line_figures import lines
from hierfl.comparisons.result_files import part_of, results, study_of
from hierfl.comparisons.study_file import Study

ACROSS = 4  # panels in a row


def figures(out: Path) -> dict[str, Figure]:
    """Return the figures of what the study in a folder measured besides, by name."""
    study = study_of(out)
    drawn: dict[str, Callable[[Study, pd.DataFrame], Figure]] = {
        "clients": clients,
        "classes": classes,
        "lines": lines,
        "entropies": lambda of, found: entropies(of, found, results(out)),
    }
    found = {part: part_of(out, part) for part in drawn}
    return {part: drawn[part](study, own) for part, own in found.items() if own is not None}


def clients(study: Study, found: pd.DataFrame) -> Figure:
    """Draw each client's score by round, first seed: a panel a method, thick for the mean."""
    found = found[found["seed"] == found["seed"].min()]
    labels = [label for label in _labels(study) if (found["method"] == label).any()]
    figure, panels = _panels(len(labels), sharey=True)
    metric = study.evaluation.metric.replace("_", " ")
    for axes, label in zip(panels, labels, strict=True):
        own = found[found["method"] == label]
        score = "P" if (own["score"] == "P").any() else "G"
        each = own[own["score"] == score].pivot(index="round", columns="client", values="value")
        axes.plot(each.index, each, marker=".", linewidth=0.7, alpha=0.6)
        axes.plot(each.index, each.mean(axis=1), marker=".", color="black", linewidth=2.0)
        axes.set_title(f"{label} ({score})", fontsize=9, loc="left")
        axes.set(xlabel="round", ylabel=f"{metric}, %")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _titled(figure, study, "each client's score")


def classes(study: Study, found: pd.DataFrame) -> Figure:
    """Draw the first client's loss by class minus the clients' mean: a panel for each test."""
    tests = [str(test) for test in found["test"].unique()]
    figure, panels = _panels(len(tests))
    labels = _labels(study)
    for axes, test in zip(panels, tests, strict=True):
        own = found[found["test"] == test].groupby(["method", "class"])["deviation"].mean()
        wide = own.unstack("method").reindex(columns=labels)
        width = 0.8 / len(labels)
        for place, label in enumerate(labels):
            at = np.arange(len(wide)) + width * (place - (len(labels) - 1) / 2.0)
            axes.bar(at, wide[label], width, label=label)
        axes.set_xticks(np.arange(len(wide)), wide.index)
        rows = {"local": "own test rows", "global": "all clients' rows"}[test]
        axes.set_title(f"on {rows}", fontsize=9, loc="left")
        axes.set(xlabel="class", ylabel="loss above the clients' mean, nats")
        axes.axhline(0.0, color="black", linewidth=0.7)
    panels[0].legend(fontsize=7, frameon=False)
    return _titled(figure, study, "the first client's loss by class")


def entropies(study: Study, found: pd.DataFrame, scores: pd.DataFrame) -> Figure:
    """Draw densities of entropy: a row a method, a column a foreign set, thin for one client."""
    sets = [str(name) for name in found["rows"].unique() if name != "own"]
    labels = [label for label in _labels(study) if (found["method"] == label).any()]
    size = (3.4 * len(sets) + 0.8, 1.9 * len(labels) + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(labels), len(sets), sharex=True, sharey=True, squeeze=False)
    shown = scores["weighting"] == study.evaluation.weighting
    scores = scores[(scores["metric"] == "auroc") & shown]
    reached = scores.groupby(["method", "test"])["value"].mean()
    for row, label in zip(panels, labels, strict=True):
        own = found[found["method"] == label]
        for axes, name in zip(row, sets, strict=True):
            parts = [
                np.stack([group.to_numpy() for _, group in of.groupby("client")["entropy"]])
                for of in (own[own["rows"] == "own"], own[own["rows"] == name])
            ]
            plots.entropies(axes, *parts, labels=("own test rows", "unknown images"))
            axes.set(xlabel=None, ylabel=None)
            title = f"{label}, {name.replace('_', ' ')}: AUROC {reached[label, name]:.2f}"
            axes.set_title(title, fontsize=8.5, loc="left")
            axes.tick_params(labelsize=7)
    # the panels share the axis: what one needs, all have
    steep = panels[0, 0].get_yscale() == "symlog"
    lines_drawn: list[Any] = [line for axes in figure.axes for line in axes.lines]
    highest = max(line.get_ydata().max() for line in lines_drawn)
    panels[0, 0].set_ylim(0.0, 1.1 * highest)
    for axes in panels[:, 0]:
        axes.set_ylabel("density, log scale above 1" if steep else "density", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("entropy of the prediction, nats", fontsize=8)
    panels[0, 0].legend(fontsize=7, frameon=False)
    return _titled(figure, study, "entropy of predictions")


def _labels(study: Study) -> list[str]:
    return [entry.label for entry in study.methods]


def _panels(count: int, *, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure and so many axes in rows of at most four."""
    across = min(count, ACROSS)
    down = -(-count // across)
    figure = Figure(figsize=(3.4 * across + 0.6, 2.6 * down + 0.5), layout="constrained")
    every = figure.subplots(down, across, squeeze=False, sharey=sharey).flatten()
    for unused in every[count:]:
        unused.set_axis_off()
    return figure, list(every[:count])


def _titled(figure: Figure, study: Study, what: str) -> Figure:
    figure.suptitle(f"{study.title}: {what}", fontsize=10)
    return figure
