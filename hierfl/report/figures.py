"""The pictures of a report, and what each shows in words for those who do not see it."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hierfl import plots
from hierfl.diagnostics import confidence
from hierfl.report.blocks import Picture, listed, number, picture, share, style
from hierfl.report.measurements import Entry, Measured

WIDE, NARROW = 5.6, 4.5  # inches
_TIGHT: dict[str, Any] = {"columnspacing": 1.2, "handletextpad": 0.5, "handlelength": 1.6}


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _legend(figure: Figure, ax: Axes, columns: int = 3) -> None:
    handles, names = ax.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=8.5,
            **_TIGHT,
        )


def run(found: Measured) -> Picture | None:
    """The ELBO or the loss of each round."""
    history = found.fit.history
    column = next((name for name in ("elbo", "loss") if name in history), None)
    if column is None or len(history) < 2:
        return None
    with style():
        figure, ax = _figure(NARROW, 2.7)
        plots.convergence(ax, history, column=column)
        ax.set_ylabel("ELBO, nats" if column == "elbo" else column)
        values = history[column]
        alt = f"Line: {column} by round, from {number(values.iloc[0], 4)} in the first to {number(values.iloc[-1], 4)} in the last."
        return picture(
            figure,
            alt,
            f"The {'ELBO' if column == 'elbo' else column} of each round, as the clients estimate it.",
        )


def forest(found: Measured, entry: Entry) -> Picture:
    """One number of every client."""
    names, rows = list(found.fit.clients), found.fit.federation.data.counts.numpy()
    named = len(names) <= 40
    with style():
        figure, ax = _figure(NARROW, min(7.0, 1.1 + (0.3 if named else 0.075) * len(names)))
        expected = entry.expected
        if expected is not None and found.alike:
            expected = expected.ravel()  # the same of every client
        plots.client_forest(ax, entry.draws, names, rows=rows, alone=entry.alone, expected=expected)
        ax.set_xlabel(entry.label)
        _legend(figure, ax)
        ends = np.quantile(entry.draws, [0.05, 0.5, 0.95], axis=0)
        told = [
            f"{n} {number(m)} ({number(a)} to {number(b)})"
            for n, a, m, b in zip(names, *ends, strict=True)
        ]
        alt = f"Forest plot of {entry.label}, median and 90 % interval: {listed(told, 12)}."
        caption = f"{entry.label} of every client: median, 50 % and 90 % intervals; grey: the 90 % interval expected of a client."
        return picture(
            figure,
            alt,
            caption
            + (" Hollow: what its own rows alone would say." if entry.alone is not None else ""),
        )


def borrowed(entry: Entry) -> float:
    """How far local-only estimates were moved to the middle: 1 less the slope of the one on the other."""
    assert entry.alone is not None
    x, y = entry.alone - entry.middle, entry.draws.mean(0) - entry.middle
    return float(1.0 - (x @ y) / max(float(x @ x), 1e-300))


def shrinkage(found: Measured, entry: Entry) -> Picture:
    """Local-only estimates beside hierarchical ones."""
    assert entry.alone is not None
    with style():
        figure, ax = _figure(NARROW, 4.6)
        rows = found.fit.federation.data.counts.numpy()
        plots.shrinkage(ax, entry.alone, entry.draws.mean(0), rows=rows, centre=entry.middle)
        ax.set_title(entry.label, fontsize=9)
        _legend(figure, ax, columns=2)
        moved = share(min(max(borrowed(entry), 0.0), 1.0))
        words = f"estimates are moved {moved} of the way from what a client's own rows alone say to the middle, on the whole."
        return picture(
            figure, f"Scatter plot of clients, {entry.label}: {words}", f"{entry.label}: {words}"
        )


def densities(found: Measured, entry: Entry) -> Picture:
    """The global level's expectation beside every client's posterior."""
    assert entry.expected is not None
    names = list(found.fit.clients)
    with style():
        figure, ax = _figure(NARROW, 3.0)
        plots.prior_and_clients(ax, entry.expected, entry.draws, names)
        ax.set_xlabel(entry.label)
        _legend(figure, ax)
        wide, own = float(entry.expected.std()), float(np.median(entry.draws.std(0)))
        alt = f"Densities of {entry.label}: expected of a client, sd {number(wide)}; the clients' posteriors, median sd {number(own)}."
        return picture(
            figure,
            alt,
            f"{entry.label}: what the global level expects of a client, and every client's posterior.",
        )


def clients(found: Measured) -> Picture | None:
    """Which clients are alike."""
    names = list(found.fit.clients)
    if len(names) < 3 or len(found.own) < 2:
        return None
    means = np.stack([e.draws.mean(0) for e in found.own], 1)
    unit = np.array([max(float(np.sqrt(e.draws.var(0).mean())), 1e-12) for e in found.own])
    if not (means.std(0) > 0.0).any():
        return None
    with style():
        figure, ax = _figure(NARROW, 3.6)
        plots.client_map(ax, means, names, rows=found.fit.federation.data.counts.numpy(), unit=unit)
        alt = f"Map of {len(names)} clients by the posterior means of their {means.shape[1]} numbers, first two principal components."
        words = "Which clients are alike: principal components of the posterior means of their numbers, each in its posterior sd."
        return picture(figure, alt, words)


def calibration(found: Measured) -> Picture | None:
    """Whether probabilities, or intervals, come true."""
    prediction = found.prediction
    if prediction is None or (prediction.kind == "numeric" and found.replicates is None):
        return None
    with style():
        figure, ax = _figure(NARROW, 4.3)
        if prediction.kind == "numeric":
            assert found.replicates is not None
            plots.coverage(ax, found.replicates, prediction.known()[0])
            alt = "Line: share of rows inside central intervals against the intervals' probability; the diagonal is right."
            return picture(
                figure, alt, "How often central intervals hold a row's label, by their probability."
            )
        p, came_true = confidence(prediction)
        bins = 8 if len(p) < 2000 else 15
        plots.reliability(ax, {"rows": (p, came_true)}, bins=bins)
        binary = prediction.kind == "binary"
        ax.set_xlabel("predicted probability" if binary else "probability of the predicted class")
        ax.set_ylabel("observed share" if binary else "share that is right")
        mean, observed, _, _ = plots.equal_mass(p, came_true, bins=bins)
        told = "; ".join(
            f"{number(a, 2)} predicted, {number(b, 2)} observed"
            for a, b in zip(mean, observed, strict=True)
        )
        alt = f"Reliability diagram of {len(mean)} bins: {told}."
        words = f"{len(mean)} bins of equal numbers of rows, with 90 % intervals; on the diagonal predictions come true."
        return picture(figure, alt, words)


def rates(found: Measured) -> Picture | None:
    """Each client's mean label beside its interval."""
    table = found.rates
    if table is None or found.prediction is None:
        return None
    what = "event rate" if found.prediction.kind == "binary" else f"mean {found.prediction.site}"
    few = len(table) <= 40
    with style():
        figure, ax = _figure(NARROW, 1.1 + 0.3 * len(table)) if few else _figure(WIDE, 3.2)
        plots.rates(ax, table)
        (ax.set_xlabel if few else ax.set_ylabel)(what)
        _legend(figure, ax)
        alt = f"Intervals of clients' {what}s: {int(table['covered'].sum())} of {len(table)} observed values lie inside."
        words = f"Observed {what} of every client beside its 90 % predictive interval{' (rows in brackets)' if few else ''}."
        return picture(figure, alt, words)


def strangers(found: Measured) -> Picture | None:
    """Entropies of own and foreign rows."""
    if found.foreign is None:
        return None
    with style():
        figure, ax = _figure(NARROW, 3.0)
        plots.entropies(ax, *found.foreign.entropies)
        _legend(figure, ax)
        own, foreign = (number(float(v.mean())) for v in found.foreign.entropies)
        alt = f"Densities of predictive entropy: own rows, mean {own} nats; foreign rows, mean {foreign}."
        return picture(figure, alt, "Entropy of predictions of own and of foreign rows.")
