"""Checks of a fit's predictions, for which rows are needed: `fit.report()` alone asks them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import pandas as pd
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
            yield _numeric_coverage(prediction, scored.replicates)
    else:
        p, came_true = confidence(prediction)
        is_worse = ((p - came_true) ** 2).mean() > (p * (1.0 - p)).mean()  # than if they were right
        error = calibration_error(p, came_true)
        off = error.p_value <= SURE
        yield answered(
            "Are predicted probabilities calibrated?",
            off,
            f"The calibration error is {number(error.ece)}; perfectly calibrated predictions "
            f"would have {number(error.by_chance)} by chance alone, for {rows} rows (p = "
            f"{number(error.p_value, 2)})"
            + (
                ". This is more than chance: the predictions are "
                f"{'over' if is_worse else 'under'}confident."
                if off
                else "."
            ),
        )
    if scored.rates is not None:
        yield _rate_coverage(prediction.kind, scored.rates)
    yield from _by_client(scored.fit, prediction)


def _numeric_coverage(prediction: Prediction, replicates: Tensor) -> Check:
    """Warn if the coverage of 90% intervals is off by more than `COVERAGE` and chance of so many rows."""
    label = prediction.known()[0]
    covered = interval_coverage(replicates, label, prob=0.9)
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


def _rate_coverage(kind: str, rates: pd.DataFrame) -> Check:
    """Warn if fewer clients' mean labels than chance explains lie in their 90% intervals."""
    covered = rates["covered"]
    off = coverage_p_value(covered, 0.9) <= SURE
    outside = list(rates.index[~covered])
    what = "event rates" if kind == "binary" else "mean labels"
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


def _by_client(fit: Snapshot, prediction: Prediction) -> Iterator[Check]:
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
    worse = _worse_than_event_rate(fit, prediction)
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


def _worse_than_event_rate(fit: Snapshot, prediction: Prediction) -> list[str]:
    """Return clients that the smoothed training event rate scores better by two standard errors."""
    counts = prediction.data.counts.tolist()
    scored = (value.double().split(counts) for value in prediction.known())
    worse, train = [], fit.federation.data
    seen = train.fields[fit.program.labels[prediction.site]].double().split(train.counts.tolist())
    for name, y, score in zip(prediction.data.names, *scored, strict=True):
        labels = seen[int(train.index([name]))]
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
