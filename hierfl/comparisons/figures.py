"""Figures of a study: scores beside published ones, curves, and what else it measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hierfl import plots
from hierfl.comparisons.line_figures import CLIENTS, legend_below, lines
from hierfl.comparisons.result_files import ALONG, curves_of, part_of, results, study_of
from hierfl.comparisons.score_table import ScoreColumn, by_seed, published
from hierfl.comparisons.study_file import Study

COLORS = {"P": "#1f6f8b", "P+FT": "#6aa84f", "G": "#e08e45"}
SHIFTS = {"P": 0.2, "P+FT": 0.0, "G": -0.2}  # of the scores of a method, in rows
STYLES = ("-", "--", ":", "-.")  # one for each ten methods, which have ten colors


def draw(out: Path, file: Path | None = None) -> list[Path]:
    """Draw all figures of the study whose results are in a folder, and return their files."""
    first = file or out / "figure.png"
    with rc_context({"text.parse_math": False}):  # in labels, $ is a dollar
        drawn = {first: figure(out)}
        drawn |= {first.with_stem(f"{first.stem}-{n}"): own for n, own in figures(out).items()}
        for path, own in drawn.items():
            own.savefig(path, dpi=150)
    return list(drawn)


def figure(out: Path) -> Figure:
    """Return the main figure of the study whose results are in a folder."""
    study, scores, by_round = study_of(out), results(out), curves_of(out)
    shown = [] if by_round.empty else [None, *(name for name in ALONG if name in by_round)]
    height = 1.2 + 0.32 * len(study.methods)
    drawn = Figure(figsize=(7.0 + 5.0 * len(shown), max(3.5, height)), layout="constrained")
    axes = drawn.subplots(1, 1 + len(shown), squeeze=False)[0]
    bars(axes[0], study, scores)
    for panel, name in zip(axes[1:], shown, strict=True):
        curves(panel, study, by_round, name)
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
        column = ScoreColumn(score, "participating", "local", metric)
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
        papers = [published(study, entry, score) for entry in study.methods]
        at = [(v, p + shift) for v, p in zip(papers, place, strict=True) if v is not None]
        if at:
            axes.scatter(
                *zip(*at, strict=True),
                marker="D",
                facecolors="none",
                edgecolors=COLORS[score],
                label=f"{score}, published",
            )
    axes.set_yticks(place, labels)
    axes.set_xlabel(f"{metric.replace('_', ' ')}, %, mean over {weighting}")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="best")


def curves(axes: Axes, study: Study, rows: pd.DataFrame, name: str | None = None) -> None:
    """Draw means over seeds by round: a column by name, else P where all methods have it, else G."""
    metric = f"{study.evaluation.metric.replace('_', ' ')}, %"
    if name is None:  # one score for all methods of a panel, where all have it
        drawn = rows[rows["method"].isin([entry.label for entry in study.methods])]
        has = {s: bool(drawn.groupby("method")[s].count().all()) for s in ("P", "G")}
        shared = next((score for score, by_all in has.items() if by_all), None)
    for place, entry in enumerate(study.methods):
        own = rows[rows["method"] == entry.label]
        if own.empty:
            continue
        score = name or shared or ("P" if own["P"].notna().any() else "G")
        mean = own.groupby("round")[score].mean()
        label = entry.label if name else f"{entry.label} ({score})"
        axes.plot(mean.index, mean, ls=STYLES[place // 10 % len(STYLES)], label=label)
    words = {"P, new": f"P of new clients, {metric}", "coherence": "coherence, -log det"}
    words |= {"distance": "distance of G from least squares"}
    axes.set_xlabel("round")
    axes.set_ylabel(words[name] if name else metric)
    if name == "distance":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")  # its own is mathematics, with $
        axes.yaxis.set_minor_formatter("")
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


ACROSS = 4  # panels in a row, at most


def figures(out: Path) -> dict[str, Figure]:
    """Return the figures of what the study in a folder measured besides, by name."""
    study = study_of(out)
    drawn: dict[str, Callable[[Study, pd.DataFrame], Figure]] = {
        "clients": clients,
        "classes": classes,
        "lines": lines,
        "entropies": lambda of, rows: entropies(of, rows, results(out)),
    }
    frames = {part: part_of(out, part) for part in drawn}
    return {part: drawn[part](study, own) for part, own in frames.items() if own is not None}


def clients(study: Study, rows: pd.DataFrame) -> Figure:
    """Draw each client's score by round, first seed: a panel a method, thick for the mean."""
    rows = rows[rows["seed"] == rows["seed"].min()]
    labels = [label for label in _labels(study) if (rows["method"] == label).any()]
    figure, panels = _panels(len(labels), sharey=True)
    metric = study.evaluation.metric.replace("_", " ")
    for axes, label in zip(panels, labels, strict=True):
        own = rows[rows["method"] == label]
        score = "P" if (own["score"] == "P").any() else "G"
        shown = own[own["score"] == score]
        by_client = shown.pivot(index="round", columns="client", values="value")
        if few := by_client.shape[1] <= len(CLIENTS):
            axes.set_prop_cycle(color=CLIENTS)
        thin: Any = {"marker": ".", "linewidth": 0.7, "alpha": 0.6}
        axes.plot(by_client.index, by_client, label=list(by_client), **thin)
        mean: Any = {"marker": ".", "linewidth": 2.0, "color": "black"}
        axes.plot(by_client.index, by_client.mean(axis=1), label="mean", **mean)
        axes.set_title(f"{label} ({score})", fontsize=9, loc="left")
        axes.set(xlabel="round", ylabel=f"{metric}, %")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if few:
        legend_below(figure, panels[0])
    return _titled(figure, study, "each client's score")


def classes(study: Study, rows_by_class: pd.DataFrame) -> Figure:
    """Draw the first client's loss by class minus the clients' mean: a panel for each test."""
    tests = [str(test) for test in rows_by_class["test"].unique()]
    figure, panels = _panels(len(tests))
    labels = _labels(study)
    for axes, test in zip(panels, tests, strict=True):
        own = rows_by_class[rows_by_class["test"] == test].groupby(["method", "class"])
        wide = own["deviation"].mean().unstack("method").reindex(columns=labels)
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


def entropies(study: Study, drawn_rows: pd.DataFrame, scores: pd.DataFrame) -> Figure:
    """Draw densities of entropy: a row per method, a column per foreign set, thin for one client."""
    sets = [str(name) for name in drawn_rows["rows"].unique() if name != "own"]
    labels = [label for label in _labels(study) if (drawn_rows["method"] == label).any()]
    size = (3.4 * len(sets) + 0.8, 1.9 * len(labels) + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(labels), len(sets), sharex=True, sharey=True, squeeze=False)
    shown = scores["weighting"] == study.evaluation.weighting
    scores = scores[(scores["metric"] == "auroc") & shown]
    reached = scores.groupby(["method", "test"])["value"].mean()
    for row, label in zip(panels, labels, strict=True):
        own = drawn_rows[drawn_rows["method"] == label]
        for axes, name in zip(row, sets, strict=True):
            densities = [
                [group.to_numpy() for _, group in of.groupby("client")["entropy"]]
                for of in (own[own["rows"] == "own"], own[own["rows"] == name])
            ]
            plots.entropies(axes, *densities, labels=("own test rows", "unknown images"))
            axes.set(xlabel=None, ylabel=None)
            title = f"{label}, {name.replace('_', ' ')}: AUROC {reached[label, name]:.3f}"
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
    style: dict[str, Any] = {"fontsize": 7, "title_fontsize": 7, "frameon": False}
    panels[0, 0].legend(title="thin: one client", **style)
    return _titled(figure, study, "entropy of predictions")


def _labels(study: Study) -> list[str]:
    return [entry.label for entry in study.methods]


def _panels(count: int, *, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    down = -(-count // ACROSS)
    across = -(-count // down)
    figure = Figure(figsize=(3.4 * across + 0.6, 2.6 * down + 0.5), layout="constrained")
    every = figure.subplots(down, across, squeeze=False, sharey=sharey).flatten()
    for unused in every[count:]:
        unused.set_axis_off()
    return figure, list(every[:count])


def _titled(figure: Figure, study: Study, what: str) -> Figure:
    figure.suptitle(f"{study.title}: {what}", fontsize=10)
    return figure
