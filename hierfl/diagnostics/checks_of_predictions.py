"""Checks of a fit's predictions, for which rows are needed: `fit.report()` alone asks them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import binomtest
from torch import Tensor

from hierfl.diagnostics.calibration import (
    calibration_error,
    client_rates,
    confidence,
    coverage_p_value,
    interval_coverage,
)
from hierfl.diagnostics.check import (
    AUROC,
    COVERAGE,
    FEW_ROWS,
    SURE,
    Check,
    answered,
    listed,
    number,
    share,
)
from hierfl.diagnostics.ood import OutOfDistribution
from hierfl.posterior.prediction import Prediction
from hierfl.posterior.snapshot import Snapshot

Floats = NDArray[np.float64]
FOREIGN = "Are predictions less certain for foreign rows (foreign=) than for the clients' own rows?"

APART = ("angle", "other")  # kinds of predictions whose means have no mean


@dataclass(frozen=True, eq=False)
class Scored:
    """Predictions that were scored, and replicates (S, n) of their labels; None where there are none."""

    fit: Snapshot
    prediction: Prediction | None
    replicates: Tensor | None
    held_out: bool
    foreign: OutOfDistribution | None

    @cached_property
    def rates(self) -> pd.DataFrame | None:
        """Mean label and 90% predictive interval of each client; None without replicates."""
        if self.prediction is None or self.replicates is None or self.prediction.kind in APART:
            return None
        return client_rates(self.prediction, self.replicates, prob=0.9)


def checks_of_predictions(scored: Scored) -> Iterator[Check]:
    """Check the scores of rows, and the certainty about foreign ones."""
    yield from _scores(scored)
    yield _foreign(scored)


def _scores(scored: Scored) -> Iterator[Check]:
    if scored.prediction is None:
        yield Check(
            "Are predictions calibrated?",
            "not asked",
            "No row can be scored: the rows have no labels, or the model observes no site on rows.",
        )
        return
    prediction, rows = scored.prediction, scored.prediction.data.num_rows
    yield answered(
        "Are predictions scored on rows that the fit has not seen?",
        not scored.held_out,
        f"Yes, on {rows} held-out rows."
        if scored.held_out
        else "No: they are scored on the training rows, so the scores are too good. Pass unseen "
        "rows as held_out=.",
    )
    if prediction.kind in ("numeric", *APART):
        if scored.replicates is not None:
            yield _numeric_coverage(scored)
    else:
        p, came_true = confidence(prediction)
        error = calibration_error(p, came_true)
        off = error.p_value <= SURE
        yield answered(
            "Are predicted probabilities calibrated?",
            off,
            f"The calibration error is {number(error.ece)}; perfectly calibrated predictions "
            f"would have {number(error.by_chance)} by chance alone, for {rows} rows (p = "
            f"{number(error.p_value, 2)})"
            + (
                f". This is more than chance: the predictions are {_too(p, came_true)}."
                if off
                else "."
            ),
        )
    if scored.rates is not None:
        yield _rate_coverage(scored)
    yield from _by_client(scored)


def _too(p: Floats, came_true: Floats) -> str:
    """Return "overconfident" if the Brier score is worse than right probabilities would have it."""
    return (
        "overconfident"
        if ((p - came_true) ** 2).mean() > (p * (1.0 - p)).mean()
        else "underconfident"
    )


def _numeric_coverage(scored: Scored) -> Check:
    """Warn if the coverage of 90% intervals is off by more than `COVERAGE` and chance of so many rows."""
    assert scored.prediction is not None and scored.replicates is not None
    label = scored.prediction.known()[0]
    covered = interval_coverage(scored.replicates, label, prob=0.9)
    rate = float(covered.mean())
    off = (
        abs(rate - 0.9) > COVERAGE
        and binomtest(round(rate * len(covered)), len(covered), 0.9).pvalue <= SURE
        # intervals of integers hold more than they must
        and (rate < 0.9 or not bool((label == label.round()).all()))
    )
    side = "too narrow" if rate < 0.9 else "wider than necessary"
    return answered(
        "Do predictive intervals of single rows have the right coverage?",
        bool(off),
        f"{share(rate)} of {len(covered)} rows{' (by entry)' * (covered.ndim > 1)} lie in their "
        "90% predictive interval" + (f": the intervals are {side}." if off else "."),
    )


def _rate_coverage(scored: Scored) -> Check:
    """Warn if fewer clients' mean labels than chance explains lie in their 90% intervals."""
    assert scored.rates is not None and scored.prediction is not None
    covered = scored.rates["covered"]
    off = coverage_p_value(covered, 0.9) <= SURE
    outside = list(scored.rates.index[~covered])
    what = "event rates" if scored.prediction.kind == "binary" else "mean labels"
    return answered(
        f"Do enough of the clients' {what} lie in their predictive intervals?",
        off,
        f"{int(covered.sum())} of {len(covered)} clients' {what} lie in their 90% predictive "
        "interval"
        + (
            f", fewer than chance explains: {listed(outside)} "
            f"{'is' if len(outside) == 1 else 'are'} outside."
            if off
            else (f"; outside: {listed(outside)}." if outside else ".")
        ),
    )


def _by_client(scored: Scored) -> Iterator[Check]:
    assert scored.prediction is not None
    prediction = scored.prediction
    counts = prediction.data.counts.tolist()
    short = [name for name, n in zip(prediction.data.names, counts, strict=True) if n < FEW_ROWS]
    yield answered(
        "Is every client scored on enough rows?",
        bool(short),
        f"{len(short)} of {len(counts)} clients {'is' if len(short) == 1 else 'are'} scored on fewer "
        f"than {FEW_ROWS} rows ({listed(short)}): their scores are mostly noise."
        if short
        else f"Yes: each client is scored on {min(counts)} rows or more.",
    )
    if prediction.kind != "binary":
        return
    worse = _worse_than_event_rate(scored)
    yield answered(
        "Does the model predict at least as well as each client's own event rate?",
        bool(worse),
        f"Not for {listed(worse)}: using the event rate of the client's own training rows as the "
        "forecast for every row scores better, by more than two standard errors."
        if worse
        else f"Yes: for no client with {FEW_ROWS} or more scored rows does its own event rate in "
        "training, used as the forecast for every row, score better by more than two standard "
        "errors.",
    )


def _worse_than_event_rate(scored: Scored) -> list[str]:
    """Return clients that the smoothed training event rate scores better by two standard errors."""
    assert scored.prediction is not None
    prediction = scored.prediction
    label, log_score = prediction.known()
    counts = prediction.data.counts.tolist()
    worse, train = [], scored.fit.federation.data
    seen = train.fields[scored.fit.program.labels[prediction.site]].double()
    for name, y, score in zip(
        prediction.data.names,
        label.double().split(counts),
        log_score.double().split(counts),
        strict=True,
    ):
        k = int(train.index([name]))
        labels = seen[train.offsets[k] : train.offsets[k + 1]]
        rate = (labels.sum() + 0.5) / (len(labels) + 1.0)
        gain = (score - (y * rate.log() + (1.0 - y) * (-rate).log1p())).numpy()
        if len(gain) >= FEW_ROWS and gain.mean() + 2.0 * gain.std(ddof=1) / len(gain) ** 0.5 < 0.0:
            worse.append(name)
    return worse


def _foreign(scored: Scored) -> Check:
    if scored.foreign is None:
        return Check(FOREIGN, "not asked", "No foreign rows were given.")
    overall = scored.foreign.overall
    by = {"predictive entropy": float(overall["auroc"])}
    if "mi_auroc" in overall:
        by["mutual information"] = float(overall["mi_auroc"])
    best = max(by, key=by.__getitem__)
    poor = by[best] < AUROC
    aurocs = ", ".join(f"{number(value)} by {name}" for name, value in by.items())
    advice = (
        f". A value below {AUROC} means that predictions are about as certain for foreign rows as "
        "for own rows, or more certain."
    )
    return answered(
        FOREIGN,
        poor,
        f"AUROC for telling foreign rows from the clients' own rows: {aurocs}"
        f"{advice if poor else f'. Use {best} to detect foreign rows.'}",
    )
