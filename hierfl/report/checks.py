"""What is asked of a fit, and what the answer is in plain words: each warning is of something measured here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pyro import poutine
from scipy.stats import binomtest

from hierfl.diagnostics import calibration_error, confidence, coverage_p_value, interval_coverage
from hierfl.diagnostics.psis import K_HAT
from hierfl.program import Answer, Program, untouched_store
from hierfl.report.blocks import listed, number, share
from hierfl.report.measured import Measured
from hierfl.sites import Family

SURE = 0.01  # of a p value: a report in a hundred warns where nothing is wrong
FEW_ROWS = 20  # rows of a client, under which its score says little
LITTLE = 0.2  # of what the global level leaves open: a client whose rows settle surely less is known by the others


@dataclass(frozen=True)
class Check:
    """A question and its answer.

    Args:
        question: what was asked.
        verdict: "good", "warning", or "not asked" where it cannot be.
        answer: in a sentence, with the numbers.
    """

    question: str
    verdict: Literal["good", "warning", "not asked"]
    answer: str


def checks(found: Measured) -> list[Check]:
    """All of them, in the order of the page."""
    made = [check for ask in (_run, _posterior, _clients, _predictions, _strangers) for check in ask(found)]
    return made


def _check(question: str, bad: bool, answer: str) -> Check:
    return Check(question, "warning" if bad else "good", answer)


# ------------------------------------------------------------------------------------------------ the run
def _run(found: Measured) -> Iterator[Check]:
    history, fit = found.fit.history, found.fit
    asked = float(history["clients"].sum()) / len(fit.clients) if "clients" in history else float(len(history))
    needed = min(5, len(history))
    yield _check(
        "Was every client asked often enough?",
        asked < needed,
        f"A client took part in {number(asked)} rounds on average"
        + (f", fewer than {needed}: some may never have been asked." if asked < needed else "."),
    )
    question = "Has the run arrived?"
    if isinstance(found.run, str):
        yield Check(question, "not asked", _sentence(found.run))
    else:
        yield _check(question, not found.run.converged, found.run.verdict)
    if "held_out_log_score" in history:
        scores = history.set_index("round")["held_out_log_score"].dropna()
        fallen = float(scores.max() - scores.iloc[-1])
        yield _check(
            "Did the held-out score go on rising?",
            fallen > 0.01,
            f"It was best after round {int(scores.idxmax()) + 1} of {len(history)}"
            + (
                f", and has fallen by {number(fallen)} nats a row since: the fit may have learned its rows by heart."
                if fallen > 0.01
                else "."
            ),
        )
    if "effective_clients" in history:
        effective, took_part = float(history["effective_clients"].iloc[-1]), float(history["clients"].iloc[-1])
        alone = took_part > 1 and effective < max(1.5, 0.1 * took_part)
        yield _check(
            "Do all clients count?",
            alone,
            f"The last round's weights are worth {number(effective)} of {took_part:.0f} clients"
            + (": a few decide for all. Weight clients by rows instead." if alone else "."),
        )


# ------------------------------------------------------------------------------------------------ the posterior
def _posterior(found: Measured) -> Iterator[Check]:
    question = "Does every number have an uncertainty?"
    if found.draws is None:
        size = found.fit.program.latents.local_block.size
        yield Check(question, "not asked", f"A client has {size:,} numbers: too many to draw and hold here.")
        return
    sites = {**found.draws.shared, **found.draws.own}
    bad = [name for name, value in sites.items() if not bool(value.isfinite().all())]
    if bad:
        yield Check(
            "Are all draws finite?", "warning", f"Draws of {listed(bad)} are not finite: nothing about them can be trusted."
        )
    program = found.fit.program
    points = [s.name for s in program.latents.sites if bool((sites[s.name] == sites[s.name][:1]).all())] + _params_of(program)
    yield _check(
        question,
        bool(points),
        f"No: {listed(points)} {'is a point estimate' if len(points) == 1 else 'are point estimates'}, and no interval here holds the "
        f"uncertainty of {'it' if len(points) == 1 else 'them'}."
        if points
        else "No site of the model is a point estimate.",
    )
    yield from _guide(found)
    scales = [s.name for s in program.latents.global_block.sites if not _reaches_below_0(s.support) and s.name not in points]
    guide = found.fit.method.guide
    family = guide.__name__ if isinstance(guide, Family) else None  # type: ignore[attr-defined]
    if scales:
        question = "May the scales above the clients depend on the clients?"
        if family == "mean_field":
            yield Check(
                question,
                "warning",
                f"No: the mean-field guide takes every number to be independent of all others. Intervals of {listed(scales)} are then "
                f"as a rule too narrow; guides.structured or guides.conditional do not assume it.",
            )
        elif family is not None:
            yield Check(question, "good", f"The guide ({family}) lets the clients' numbers depend on {listed(scales)}.")
        else:
            yield Check(question, "not asked", "The guide is one's own: what it takes to be independent is not read off it.")


def _guide(found: Measured) -> Iterator[Check]:
    question, history = "Is the guide near enough to the posterior for weights to make up the rest?", found.fit.history
    if "k_hat" in history and bool(history["k_hat"].notna().any()):  # a method that has weighed its draws already
        k_hat = float(history["k_hat"].dropna().iloc[-1])
        yield _check(question, k_hat >= K_HAT, f"k-hat of the method's own weights is {number(k_hat, 2)}{_far(k_hat)}.")
        return
    if isinstance(found.weighed, str):
        yield Check(question, "not asked", _sentence(found.weighed))
        return
    weighed = found.weighed
    yield _check(
        question,
        weighed.k_hat >= K_HAT,
        f"k-hat is {number(weighed.k_hat, 2)}, of {weighed.proposals} draws, of which {number(weighed.effective, 2)} are effective"
        f"{_far(weighed.k_hat)}.",
    )
    own = weighed.k_hat_clients.dropna()
    if len(own):
        bad = own[own >= K_HAT]
        yield _check(
            "Is the guide near enough for every client, given the global level?",
            bool(len(bad)),
            f"k-hat is above {K_HAT} for {len(bad)} of {len(own)} clients: {listed([f'{n} {number(k, 2)}' for n, k in bad.items()])}."
            if len(bad)
            else f"The largest k-hat of a client is {number(float(own.max()), 2)}.",
        )


def _far(k_hat: float) -> str:
    if k_hat < K_HAT:
        return ""
    return (
        f", above {K_HAT}: the guide misses a part of the posterior, so that spreads and tails here are the guide's, not to be taken "
        f"for the posterior's without another check (fit.check)"
    )


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}" + ("" if words.endswith(".") else ".")


def _params_of(program: Program) -> list[str]:
    """The model's own params: learned, but no sites."""
    above, mine = program.start()
    with Answer({**above, **mine}, program.prototype), untouched_store(), torch.no_grad():
        nodes = poutine.trace(program.model).get_trace(program.prototype).nodes
    return [name for name, node in nodes.items() if node["type"] == "param"]


def _reaches_below_0(support: object) -> bool:
    """Whether a support is other than all positive numbers."""
    support = getattr(support, "base_constraint", support)
    bound = getattr(support, "lower_bound", None)
    return bound is None or hasattr(support, "upper_bound") or float(np.min(np.asarray(bound))) < 0.0


# ------------------------------------------------------------------------------------------------ the clients
def _clients(found: Measured) -> Iterator[Check]:
    counts, names = found.fit.federation.data.counts.tolist(), found.fit.clients
    few = [f"{name}: {count}" for name, count in zip(names, counts, strict=True) if count < FEW_ROWS]
    yield _check(
        "Has every client rows enough?",
        bool(few),
        f"{len(few)} of {len(names)} clients have fewer than {FEW_ROWS} rows ({listed(few)}): how well the model fits them cannot be "
        f"told from their rows."
        if few
        else f"The smallest has {min(counts)}.",
    )
    if found.told is None:
        return
    settled = found.told["share"]
    silent, least, most = settled[settled + 1.64 * found.told["error"] < LITTLE], float(settled.min()), float(settled.max())
    yield _check(
        "Do clients' own rows say much about them?",
        bool(len(silent)),
        f"{len(silent)} of {len(names)} clients ({listed(list(silent.index))}) settle less than {share(LITTLE)} of what the global "
        f"level leaves open about them: their posterior is nearly what would be said of any client."
        if len(silent)
        else f"Of what the global level leaves open about a client, its own rows settle {share(least)} to {share(most)}.",
    )


# ------------------------------------------------------------------------------------------------ predictions
def _predictions(found: Measured) -> Iterator[Check]:
    if found.prediction is None:
        yield Check("Do predictions come true?", "not asked", "There are no labelled rows of one observed site to score.")
        return
    prediction, rows = found.prediction, found.prediction.data.num_rows
    yield _check(
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
        yield _check(
            "Do predicted probabilities come true?",
            off,
            f"The calibration error is {number(error.ece)}; chance alone gives {number(error.by_chance)} for {rows} rows "
            f"(p = {number(error.p_value, 2)})"
            + (": more than chance, so probabilities are not to be taken at their word." if off else "."),
        )
    if found.rates is not None:
        yield _rate_coverage(found)
    yield from _by_client(found)


def _numeric_coverage(found: Measured) -> Check:
    assert found.prediction is not None and found.replicates is not None
    covered = interval_coverage(found.replicates, found.prediction.known()[0], prob=0.9)
    rate = float(covered.mean())
    off = abs(rate - 0.9) > 0.03 and binomtest(int(covered.sum()), len(covered), 0.9).pvalue <= SURE
    side = "too narrow" if rate < 0.9 else "wider than need be"
    return _check(
        "Do intervals of single rows cover?",
        bool(off),
        f"{share(rate)} of {len(covered)} rows lie in their 90 % interval" + (f": intervals are {side}." if off else "."),
    )


def _rate_coverage(found: Measured) -> Check:
    assert found.rates is not None and found.prediction is not None
    covered = found.rates["covered"]
    off = coverage_p_value(covered, 0.9) <= SURE
    outside = list(found.rates.index[~covered])
    what = "event rates" if found.prediction.kind == "binary" else "mean labels"
    return _check(
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
    yield _check(
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
    for name, y, score in zip(prediction.data.names, label.double().split(counts), log_score.double().split(counts), strict=True):
        k = int(train.index([name]))
        known = seen[train.offsets[k] : train.offsets[k + 1]]
        rate = (known.sum() + 0.5) / (len(known) + 1.0)
        gain = (score - (y * rate.log() + (1.0 - y) * (-rate).log1p())).numpy()
        if len(gain) >= FEW_ROWS and gain.mean() + 2.0 * gain.std(ddof=1) / len(gain) ** 0.5 < 0.0:
            worse.append(name)
    yield _check(
        "Is every client served better than by its event rate alone?",
        bool(worse),
        f"{listed(worse)}: a forecast of its own event rate for everybody scores better, by more than chance."
        if worse
        else "For no client does its event rate, as a forecast for everybody, score better by more than two standard errors.",
    )


# ------------------------------------------------------------------------------------------------ strangers
def _strangers(found: Measured) -> Iterator[Check]:
    if found.foreign is None:
        yield Check("Does the model know foreign rows when it sees them?", "not asked", "No foreign rows were given: foreign=.")
        return
    overall = found.foreign.overall
    by = {"entropy of predictions": float(overall["auroc"])}
    if "mi_auroc" in overall:
        by["mutual information"] = float(overall["mi_auroc"])
    best = max(by, key=by.__getitem__)
    poor = by[best] < 0.75
    told = ", ".join(f"{number(value)} by {name}" for name, value in by.items())
    yield _check(
        "Does the model know foreign rows when it sees them?",
        poor,
        f"AUROC of foreign against own rows: {told}"
        + (". It is about as sure of foreign rows as of its own." if poor else f". Go by {best}."),
    )
