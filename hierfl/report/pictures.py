"""Figures of the report, each with a description in words for readers who cannot see it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hierfl import plots
from hierfl.diagnostics import confidence, equal_mass
from hierfl.diagnostics.check import listed, number
from hierfl.diagnostics.verdict import same_for_all
from hierfl.report.measure import Measured, SiteEntry

WIDE, NARROW = 5.6, 4.5  # inches
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "loc": "outside lower center"}
_LEGEND |= {"columnspacing": 1.2, "handletextpad": 0.5, "handlelength": 1.6}


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """Draw with small text, in which $ is a dollar, and SVG bytes that depend only on content."""
    size: Any = {"font.size": 9.0, "axes.labelsize": 9.0, "text.parse_math": False}
    with mpl.rc_context({**size, "svg.hashsalt": "hierfl", "svg.fonttype": "path"}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots()


def _legend(figure: Figure, ax: Axes, columns: int = 3) -> None:
    handles, names = ax.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, ncols=columns, **_LEGEND)


def run(measured: Measured) -> Picture | None:
    """Draw the ELBO or loss of each round; None without either, or with one round."""
    history = measured.fit.history
    column = next((name for name in ("elbo", "loss") if name in history), None)
    if column is None or len(history) < 2:
        return None
    with _figure(NARROW, 2.7) as (figure, ax):
        plots.convergence(ax, history, column=column)
        ax.set_ylabel("ELBO, nats" if column == "elbo" else column)
        values = history[column]
        alt = (
            f"Line chart of the {'ELBO' if column == 'elbo' else column} by round: "
            f"{number(values.iloc[0], 4)} in the first, {number(values.iloc[-1], 4)} in the last."
        )
        what = "ELBO (evidence lower bound, higher is better)" if column == "elbo" else column
        return picture(figure, alt, f"The {what} in each round, as estimated by the clients.")


def forest(measured: Measured, entry: SiteEntry) -> Picture:
    """Draw one scalar of every client."""
    names, rows = list(measured.fit.clients), measured.fit.federation.data.counts.numpy()
    with_names = len(names) <= 40
    height = min(7.0, 1.1 + (0.3 if with_names else 0.075) * len(names))
    with _figure(NARROW, height) as (figure, ax):
        expected = entry.expected
        if expected is not None and same_for_all(measured.fit):
            expected = expected.ravel()  # the same for every client
        plots.client_forest(
            ax, entry.draws, names, rows=rows, local_only=entry.local_only, prior=expected
        )
        ax.set_xlabel(entry.label)
        _legend(figure, ax)
        ends = np.quantile(entry.draws, [0.05, 0.5, 0.95], axis=0)
        intervals = [
            f"{n} {number(m)} ({number(a)} to {number(b)})"
            for n, a, m, b in zip(names, *ends, strict=True)
        ]
        alt = f"Forest plot of {entry.label}, posterior median and 90% interval: {listed(intervals, 12)}."
        caption = (
            f"{entry.label} of each client{' (number of rows in brackets)' if with_names else ''}: "
            "posterior median, 50% and 90% intervals. Gray band: 90% interval of the global "
            "prior, which is what the global level alone predicts for a client."
        )
        if entry.local_only is not None:
            caption += " Hollow diamonds: estimates from each client's own rows only."
        return picture(figure, alt, caption)


def shrinkage(measured: Measured, entry: SiteEntry) -> Picture:
    """Draw the hierarchical estimates of one scalar against the local-only estimates."""
    assert entry.local_only is not None
    with _figure(NARROW, 4.6) as (figure, ax):
        rows = measured.fit.federation.data.counts.numpy()
        alone, together = entry.local_only, entry.draws.mean(0)
        plots.shrinkage(ax, alone, together, rows=rows, center=entry.middle)
        ax.set_title(entry.label, fontsize=9)
        _legend(figure, ax, columns=2)
        before, after = abs(alone - entry.middle), abs(together - entry.middle)
        words = (
            f"the estimates of {int((after < before).sum())} of {len(before)} clients are nearer "
            f"to the common center ({number(entry.middle)}) than their local-only estimates (own "
            f"rows only). The median distance to it is {number(float(np.median(after)))}, and "
            f"{number(float(np.median(before)))} for the local-only estimates."
        )
        words = f"{entry.label}: {words}"
        return picture(figure, f"Scatter plot of clients, {words}", words)


def densities(measured: Measured, entry: SiteEntry) -> Picture:
    """Draw the densities of the global prior and of every client's posterior, for one scalar."""
    assert entry.expected is not None
    names = list(measured.fit.clients)
    with _figure(NARROW, 3.0) as (figure, ax):
        plots.prior_and_clients(ax, entry.expected, entry.draws, names)
        ax.set_xlabel(entry.label)
        _legend(figure, ax)
        wide, own = float(entry.expected.std()), float(np.median(entry.draws.std(0)))
        alt = (
            f"Densities of {entry.label}: global prior, SD {number(wide)}; the clients' "
            f"posteriors, median SD {number(own)}."
        )
        words = f"{entry.label}: density of the global prior and of each client's posterior."
        return picture(figure, alt, words)


def clients(measured: Measured) -> Picture | None:
    """Draw a map of clients; None for few clients or scalars, or if all are equal."""
    names = list(measured.fit.clients)
    if len(names) < 3 or len(measured.own) < 2:
        return None
    means = np.stack([e.draws.mean(0) for e in measured.own], 1)
    unit = np.array([max(float(np.sqrt(e.draws.var(0).mean())), 1e-12) for e in measured.own])
    if not (means.std(0) > 0.0).any():
        return None
    with _figure(NARROW, 3.6) as (figure, ax):
        plots.client_map(
            ax, means, names, rows=measured.fit.federation.data.counts.numpy(), unit=unit
        )
        alt = (
            f"Map of {len(names)} clients: first two principal components of the posterior means "
            f"of their {means.shape[1]} parameters."
        )
        words = (
            "Clients that lie close together are similar: first two principal components of the "
            "posterior means of their parameters, each divided by its posterior SD."
        )
        return picture(figure, alt, words)


def calibration(measured: Measured) -> Picture | None:
    """Draw the calibration of probabilities or intervals; None without predictions."""
    prediction = measured.scored.prediction
    numeric = prediction is not None and prediction.kind in ("numeric", "angle", "other")
    if prediction is None or (numeric and measured.scored.replicates is None):
        return None
    with _figure(NARROW, 4.3) as (figure, ax):
        if numeric:
            assert measured.scored.replicates is not None
            label = prediction.known()[0].flatten()
            plots.coverage(ax, measured.scored.replicates.flatten(1), label)
            words = "hare of rows whose label lies in its central predictive interval, by the "
            words += "probability of the interval. On the diagonal, intervals are calibrated."
            return picture(figure, f"Line chart: s{words}", f"S{words}")
        p, came_true = confidence(prediction)
        bins = 8 if len(p) < 2000 else 15
        plots.reliability(ax, {"rows": (p, came_true)}, bins=bins)
        binary = prediction.kind == "binary"
        ax.set_xlabel("predicted probability" if binary else "probability of the predicted class")
        ax.set_ylabel("observed event rate" if binary else "share of correct predictions")
        mean, observed, _, _ = equal_mass(p, came_true, bins=bins)
        pairs = "; ".join(
            f"{number(a, 2)} predicted, {number(b, 2)} observed"
            for a, b in zip(mean, observed, strict=True)
        )
        alt = f"Reliability diagram of {len(mean)} bins: {pairs}."
        words = (
            f"{len(mean)} bins with equal numbers of rows, with 90% intervals. On the diagonal, "
            "predictions are calibrated."
        )
        return picture(figure, alt, words)


def rates(measured: Measured) -> Picture | None:
    """Draw each client's mean label over its predictive interval; None without one."""
    table = measured.scored.rates
    if table is None or measured.scored.prediction is None:
        return None
    prediction = measured.scored.prediction
    what = "event rate" if prediction.kind == "binary" else f"mean {prediction.site}"
    with_names = len(table) <= 40
    ticks = ", with a tick at the predicted mean (number of rows in brackets)" if with_names else ""
    size = (NARROW, 1.1 + 0.3 * len(table)) if with_names else (WIDE, 3.2)
    with _figure(*size) as (figure, ax):
        plots.rates(ax, table)
        (ax.set_xlabel if with_names else ax.set_ylabel)(what)
        _legend(figure, ax)
        alt = (
            f"Predictive intervals of clients' {what}s: {int(table['covered'].sum())} of "
            f"{len(table)} observed values lie inside."
        )
        words = f"Observed {what} of each client and its 90% predictive interval{ticks}."
        return picture(figure, alt, words)


def strangers(measured: Measured) -> Picture | None:
    """Draw the predictive entropies of own and of foreign rows; None without foreign rows."""
    if measured.scored.foreign is None:
        return None
    with _figure(NARROW, 3.0) as (figure, ax):
        plots.entropies(ax, *measured.scored.foreign.entropies)
        _legend(figure, ax)
        own, foreign = (number(float(v.mean())) for v in measured.scored.foreign.entropies)
        alt = (
            f"Densities of predictive entropy, nats: own rows, mean {own}; foreign rows, {foreign}."
        )
        words = "Predictive entropy of own and of foreign rows; higher means less certain."
        return picture(figure, alt, words)


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    words: str
    kind: Literal["text"] = "text"


@dataclass(frozen=True)
class ReportTable:
    """A table with row headers and a `note`; cells of `words` hold text, left-aligned and wrapped."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    words: bool = False
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Picture:
    """A figure: SVG as a data URI, a description in words, width and height in pixels."""

    source: str
    alt: str
    caption: str
    width: int
    height: int
    kind: Literal["picture"] = "picture"


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; `name` is its id."""

    name: str
    title: str
    blocks: tuple[Text | ReportTable | Picture, ...]


def picture(figure: Figure, alt: str, caption: str) -> Picture:
    """Return a Matplotlib figure as SVG, to be shown at its own size at 96 pixels per inch."""
    held = io.BytesIO()
    figure.savefig(held, format="svg", metadata={"Date": None})
    source = "data:image/svg+xml;base64," + base64.b64encode(held.getvalue()).decode()
    width, height = (round(96.0 * float(inches)) for inches in figure.get_size_inches())
    return Picture(source, alt, caption, width, height)
