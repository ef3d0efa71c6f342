"""What is asked of a fit's predictions."""

from __future__ import annotations

from collections.abc import Iterator

from scipy.stats import binomtest

from hierfl.diagnostics import calibration_error, confidence, coverage_p_value, interval_coverage
from hierfl.report.blocks import FEW_ROWS, Check, answered, listed, number, share
from hierfl.report.measurements import Floats, Measured

SURE = 0.01  # of a p value: a report in a hundred warns where nothing is wrong


def predictions(found: Measured) -> Iterator[Check]:
    """Do probabilities and intervals come true, for all rows, for clients' means, and client by client?"""
    if found.prediction is None:
        yield Check(
            "Do predictions come true?",
            "not asked",
            "There are no labelled rows of one observed site to score.",
        )
        return
    prediction, rows = found.prediction, found.prediction.data.num_rows
    yield answered(
        "Are predictions scored on rows that the fit has not seen?",
        not found.held_out,
        f"Yes, on {rows} held-out rows."
        if found.held_out
        else "No: they are scored on the training rows, which flatters them. Give held_out=.",
    )
    if prediction.kind == "numeric":
        if found.replicates is not None:
            yield _numeric_coverage(found)
    else:
        p, came_true = confidence(prediction)
        error = calibration_error(p, came_true)
        off = error.p_value <= SURE
        yield answered(
            "Do predicted probabilities come true?",
            off,
            f"The calibration error is {number(error.ece)}; chance alone gives {number(error.by_chance)} for {rows} rows "
            f"(p = {number(error.p_value, 2)})"
            + (f": more than chance, predictions are {_too(p, came_true)}." if off else "."),
        )
    if found.rates is not None:
        yield _rate_coverage(found)
    yield from _by_client(found)


def _too(p: Floats, came_true: Floats) -> str:
    """Whether the Brier score is worse than it would be were the probabilities right, or better."""
    return (
        "too sure of themselves"
        if ((p - came_true) ** 2).mean() > (p * (1.0 - p)).mean()
        else "less sure than they could be"
    )


def _numeric_coverage(found: Measured) -> Check:
    assert found.prediction is not None and found.replicates is not None
    covered = interval_coverage(found.replicates, found.prediction.known()[0], prob=0.9)
    rate = float(covered.mean())
    off = abs(rate - 0.9) > 0.03 and binomtest(int(covered.sum()), len(covered), 0.9).pvalue <= SURE
    side = "too narrow" if rate < 0.9 else "wider than need be"
    return answered(
        "Do intervals of single rows cover?",
        bool(off),
        f"{share(rate)} of {len(covered)} rows lie in their 90 % interval"
        + (f": intervals are {side}." if off else "."),
    )


def _rate_coverage(found: Measured) -> Check:
    assert found.rates is not None and found.prediction is not None
    covered = found.rates["covered"]
    off = coverage_p_value(covered, 0.9) <= SURE
    outside = list(found.rates.index[~covered])
    what = "event rates" if found.prediction.kind == "binary" else "mean labels"
    return answered(
        f"Do intervals of clients' {what} cover?",
        off,
        f"{int(covered.sum())} of {len(covered)} clients' {what} lie in their 90 % predictive interval"
        + (
            f", too few by chance: {listed(outside)} {'is' if len(outside) == 1 else 'are'} outside."
            if off
            else (f"; outside: {listed(outside)}." if outside else ".")
        ),
    )


def _by_client(found: Measured) -> Iterator[Check]:
    assert found.prediction is not None
    prediction = found.prediction
    label, log_score = prediction.known()
    counts = prediction.data.counts.tolist()
    few = [name for name, n in zip(prediction.data.names, counts, strict=True) if n < FEW_ROWS]
    yield answered(
        "Does every client's own score mean something?",
        bool(few),
        f"{len(few)} of {len(counts)} clients are scored on fewer than {FEW_ROWS} rows ({listed(few)}): their own scores are mostly luck."
        if few
        else f"Each rests on {min(counts)} rows or more.",
    )
    if prediction.kind != "binary":
        return
    worse, train = [], found.fit.federation.data
    seen = train.fields[found.fit.program.labels[prediction.site]].double()
    for name, y, score in zip(
        prediction.data.names,
        label.double().split(counts),
        log_score.double().split(counts),
        strict=True,
    ):
        k = int(train.index([name]))
        known = seen[train.offsets[k] : train.offsets[k + 1]]
        rate = (known.sum() + 0.5) / (len(known) + 1.0)
        gain = (score - (y * rate.log() + (1.0 - y) * (-rate).log1p())).numpy()
        if len(gain) >= FEW_ROWS and gain.mean() + 2.0 * gain.std(ddof=1) / len(gain) ** 0.5 < 0.0:
            worse.append(name)
    yield answered(
        "Is every client served better than by its event rate alone?",
        bool(worse),
        f"{listed(worse)}: a forecast of its own event rate for everybody scores better, by more than chance."
        if worse
        else "For no client does its event rate, as a forecast for everybody, score better by more than two standard errors.",
    )


def strangers(found: Measured) -> Iterator[Check]:
    """Are foreign rows told from own ones?"""
    if found.foreign is None:
        yield Check(
            "Does the model know foreign rows when it sees them?",
            "not asked",
            "No foreign rows were given: foreign=.",
        )
        return
    overall = found.foreign.overall
    by = {"entropy of predictions": float(overall["auroc"])}
    if "mi_auroc" in overall:
        by["mutual information"] = float(overall["mi_auroc"])
    best = max(by, key=by.__getitem__)
    poor = by[best] < 0.75
    told = ", ".join(f"{number(value)} by {name}" for name, value in by.items())
    yield answered(
        "Does the model know foreign rows when it sees them?",
        poor,
        f"AUROC of foreign against own rows: {told}"
        + (". It is about as sure of foreign rows as of its own." if poor else f". Go by {best}."),
    )
