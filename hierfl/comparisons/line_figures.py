"""Figures of lines that studies fit: over the rows of one feature, or as weights of two."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from hierfl.comparisons.federations import of_study
from hierfl.comparisons.study_file import Study
from hierfl.data.clients import ClientData
from hierfl.studies.drawn_clients import exact_posterior, least_squares

CLIENTS = ("#1f6f8b", "#e08e45", "#6aa84f", "#8e5ea2", "#c0392b")
ELLIPSES = (1.0, 2.0)  # sds


def lines(study: Study, weights: pd.DataFrame) -> Figure:
    """Draw the lines of the first seed: over the rows of one feature, or as weights of two."""
    rows = of_study(study, study.run.seeds[0]).train
    labels = [e.label for e in study.methods if (weights["method"] == e.label).any()]
    draw = _over_rows if rows.fields["x"].shape[1] == 1 else _in_weights
    figure = draw(study, rows, weights, labels)
    figure.suptitle(f"{study.title}, seed {study.run.seeds[0]}", fontsize=10)
    return figure


def _in_weights(study: Study, rows: ClientData, weights: pd.DataFrame, labels: list[str]) -> Figure:
    """Draw the common weights by round, and then each method's weights of every client."""
    figure = Figure(figsize=(3.3 * (1 + len(labels)), 3.9), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(labels), sharex=True, sharey=True)
    bias = study.net.bias
    exact = exact_posterior(rows, bias=bias)
    for axes in (first, *others):
        for k in range(rows.num_clients):
            alone = exact_posterior(rows.select([k]), bias=bias)
            _ellipses(axes, *alone, color=CLIENTS[k], lw=0.8, alpha=0.6, zorder=1)
        _ellipses(axes, *exact, color="black", lw=1.2, zorder=7)
        axes.plot(*exact[0][:2], marker="*", markersize=11, ls="none", color="black", zorder=5)
        axes.set_xlabel("first weight", fontsize=8)
        axes.tick_params(labelsize=7)
    common = weights[weights["score"] == "G"]
    for label in labels:
        own = common[common["method"] == label].sort_values("round")
        first.plot(own["w0"], own["w1"], marker=".", markersize=3, lw=1.0, label=label)
    first.set_title("common weights by round", fontsize=9, loc="left")
    first.set_ylabel("second weight", fontsize=8)
    for axes, label in zip(others, labels, strict=True):
        served = weights[(weights["method"] == label) & (weights["score"] == "P")]
        _served(axes, served, rows.names)
        drawn = served["draw"].max() > 0
        kind = "draws of each client's" if drawn else "each client's"
        words = _widths(served, exact[1]) if drawn else ""
        axes.set_title(f"{label}: {kind} weights{words}", fontsize=9, loc="left")
    star: Any = {"marker": "*", "ls": "none", "color": "black", "markersize": 9}
    first.plot([], [], label="least squares on all rows", **star)
    words = "exact posterior of all rows: 1 and 2 sds"
    first.plot([], [], color="black", lw=1.2, label=words)
    for k, client in enumerate(rows.names):
        words = f"{client}; its rows alone: 1 and 2 sds"
        first.plot([], [], color=CLIENTS[k], lw=0.8, marker=".", label=words)
    legend_below(figure, first)
    return figure


def _served(axes: Axes, served: pd.DataFrame, names: tuple[str, ...]) -> None:
    """Draw a method's weights of every client, points or draws."""
    for k, client in enumerate(names):
        own = served[served["client"] == client]
        # the second client's point, smaller, is seen on the first one's
        size = 6 if len(own) > 1 else 90 / (k + 1) ** 2
        axes.scatter(own["w0"], own["w1"], s=size, color=CLIENTS[k], zorder=6)


def _widths(served: pd.DataFrame, covariance: Tensor) -> str:
    """Return the sds of a method's draws beside the exact ones, as a line of a title."""
    own = served.groupby("client")[["w0", "w1"]].std().mean()
    exact = covariance.diagonal().sqrt().tolist()
    return f"\nsd {own['w0']:.2f}, {own['w1']:.2f}; exact {exact[0]:.2f}, {exact[1]:.2f}"


def _ellipses(axes: Axes, mean: Tensor, covariance: Tensor, **style: Any) -> None:
    """Draw one and two sds of a posterior of two weights."""
    angle = torch.linspace(0.0, 2.0 * torch.pi, 200, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()])
    root = torch.linalg.cholesky(covariance[:2, :2])
    for sd in ELLIPSES:
        axes.plot(*(mean[:2, None] + sd * root @ circle), **style)


def _over_rows(study: Study, rows: ClientData, weights: pd.DataFrame, labels: list[str]) -> Figure:
    """Draw training rows with the line of all, and each method's common and clients' lines."""
    figure = Figure(figsize=(3.1 * (1 + len(labels)), 4.0), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(labels), sharex=True, sharey=True)
    x, y = rows.fields["x"][:, 0].double(), rows.fields["y"].double()
    low, high = float(y.min()), float(y.max())
    pad = 0.15 * (high - low)
    for axes in (first, *others):
        for k, own in enumerate(rows.row_client.unique().tolist()):
            at = rows.row_client == own
            size, shown = (8, 0.35) if int(at.sum()) > 3 else (28, 1.0)
            axes.scatter(x[at], y[at], s=size, color=CLIENTS[k], alpha=shown, zorder=3)
        axes.set(ylim=(low - pad, high + pad))
        axes.set_xlabel("x", fontsize=8)
        axes.tick_params(labelsize=7)
    first.set_ylabel("y", fontsize=8)
    slope, intercept = least_squares(rows, bias=True).tolist()
    first.axline((0.0, intercept), slope=slope, color="black", label="least squares on all rows")
    first.set_title(f"least squares on all rows\ny = {slope:.2f} x {intercept:+.2f}", fontsize=9)
    for axes, label in zip(others, labels, strict=True):
        _clients_lines(axes, rows, weights[weights["method"] == label], label)
    first.plot([], [], color="black", ls="--", lw=1.0, label="a method's common line")
    for k, client in enumerate(rows.names):
        count = int(rows.counts[k])
        words = f"{client}, {count} row{'s' * (count > 1)}"
        first.plot([], [], color=CLIENTS[k], lw=1.8, label=words)
    legend_below(figure, first)
    return figure


def _clients_lines(axes: Axes, rows: ClientData, own: pd.DataFrame, label: str) -> None:
    """Draw one method's common line, and each client's about the middle of its rows."""
    served = own[own["score"] == "P"]
    for k, client in enumerate(rows.names):
        middle = float(rows.select([k]).fields["x"].double().mean())
        ends = np.array([middle - 2.0, middle + 2.0])
        client_lines = served[served["client"] == client]
        how: Any = {"lw": 1.8} if len(client_lines) == 1 else {"lw": 0.5, "alpha": 0.3}
        for line in client_lines.itertuples():
            axes.plot(ends, line.w0 * ends + line.w1, color=CLIENTS[k], **how)
    common = own[own["score"] == "G"].sort_values("round").iloc[-1]
    axes.axline((0.0, common["w1"]), slope=common["w0"], color="black", lw=1.0, ls="--")
    slopes = served.groupby("client")["w0"].mean()
    spread = f"clients' slopes {slopes.min():.2f} to {slopes.max():.2f}"
    axes.set_title(f"{label}\n{spread}", fontsize=9)


def legend_below(figure: Figure, axes: Axes) -> None:
    """Draw the labels of some axes in one row below a figure."""
    handles, names = axes.get_legend_handles_labels()
    where: Any = {"loc": "outside lower center", "ncols": len(names), "frameon": False}
    figure.legend(handles, names, fontsize=8, **where)
