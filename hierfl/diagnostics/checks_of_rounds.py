"""Checks of the rounds: who took part, whose updates stand out, the server's chains."""

import math
from collections.abc import Iterator

import torch

from hierfl.core.trees import named_leaves
from hierfl.diagnostics.check import (
    DOMINATED,
    FALLEN,
    LEAST_CLIENTS,
    R_HAT,
    ROUNDS_EACH,
    Check,
    answered,
    listed,
    number,
)
from hierfl.engine.aggregate import COMPARED, CONFLICTS, FEWEST_COMPARED
from hierfl.engine.client_store import taken
from hierfl.engine.rounds import absent_from, left_out_of_rounds, records_of
from hierfl.methods.stages.server import ROWS_COMPARED
from hierfl.posterior.snapshot import Snapshot

AT_ONCE = 4096  # clients whose states are looked at together


def checks_of_rounds(fit: Snapshot) -> Iterator[Check]:
    """Check who took part, the held-out score, the clients' weights and the server's chains."""
    yield _participation(fit)
    yield from _validation_score(fit)
    yield from _concentration(fit)
    yield from _chains(fit)


def clients_of_rounds(fit: Snapshot) -> Iterator[Check]:
    """Say which clients were left out of rounds, and whose updates or summaries stand out."""
    yield from _left_out(fit)
    yield from _far_out(fit)
    yield from _conflicting(fit)


def _participation(fit: Snapshot) -> Check:
    question, history = "Did the clients take part in enough rounds?", fit.history
    if unseen := _never_seen(fit):
        return Check(
            question,
            "warning",
            f"{len(unseen)} of {len(fit.clients)} clients ({listed(unseen)}) have never taken "
            "part, so their local sites are still at their start. Run more rounds, or let more clients "
            "take part in each (cohort=).",
            "fatal",
        )
    times = float(len(history))
    if "clients" in history:
        times = float(history["clients"].sum()) / len(fit.clients)
    needed = min(ROUNDS_EACH, len(history))
    why = f", fewer than {needed}: some clients may never have taken part"
    return answered(
        question,
        times < needed,
        f"On average, a client took part in {number(times)} rounds{why if times < needed else ''}.",
    )


def _never_seen(fit: Snapshot) -> list[str]:
    """Return the clients whose states are those before the first round, where others' are not."""
    start = named_leaves(fit.federation.client.own)
    if not start:
        return []
    same = torch.ones(len(fit.clients), dtype=torch.bool)
    for ids in torch.arange(len(fit.clients)).split(AT_ONCE):
        for name, leaf in named_leaves(taken(fit.progress.table, ids)).items():
            same[ids] &= (leaf == start[name]).reshape(len(ids), -1).all(1)
    return [] if bool(same.all()) else [fit.clients[i] for i in same.nonzero()[:, 0].tolist()]


def _validation_score(fit: Snapshot) -> Iterator[Check]:
    if "validation_log_score" not in fit.history:
        return
    scores = fit.history.set_index("round")["validation_log_score"].dropna()
    fallen = float(scores.max() - scores.iloc[-1])
    since = f", and has fallen by {number(fallen)} nats per row since: the fit may be overfitting"
    yield answered(
        "Is the held-out score still near its best?",
        fallen > FALLEN,
        f"The held-out log score was best after round {int(scores.idxmax()) + 1} of "
        f"{len(fit.history)}{since if fallen > FALLEN else ''}.",
    )


def _concentration(fit: Snapshot) -> Iterator[Check]:
    if "effective_clients" not in fit.history:
        return
    effective, took_part = (
        float(fit.history[name].iloc[-1]) for name in ("effective_clients", "clients")
    )
    alone = took_part > 1 and effective < max(LEAST_CLIENTS, DOMINATED * took_part)
    why = ": a few clients dominate the result. Weight clients by their number of rows instead"
    yield answered(
        "Do all clients contribute to the result?",
        alone,
        f"The weights of the last round are equivalent to {number(effective)} equally weighted "
        f"clients, of {took_part:.0f} that took part{why if alone else ''}.",
    )


def _chains(fit: Snapshot) -> Iterator[Check]:
    """Warn if the server's chains have not mixed; asked only if it samples by chains."""
    if "r_hat" not in fit.history or fit.progress.ended is not None:  # `convergence` says it
        return
    r_hat = float(fit.history["r_hat"].iloc[-1])
    if math.isnan(r_hat):  # the last draws are weighted ones
        return
    bad = not r_hat <= R_HAT
    why = (
        f", above {R_HAT}: they have not mixed, so do not trust standard deviations and "
        "intervals. A prior that keeps scales away from infinity helps"
    )
    yield answered(
        "Have the server's chains mixed?",
        bad,
        f"The largest split R-hat of the server's chains is {number(r_hat)}{why if bad else ''}.",
        "fatal",
    )


def _left_out(fit: Snapshot) -> Iterator[Check]:
    history = fit.progress.history
    if not any("left_out" in record for record in history):
        return
    absences, rounds, absent = left_out_of_rounds(history), len(history), absent_from(history)
    words = [
        f"{name} (in {len(times)} of {rounds} rounds, first in round {times[0][0] + 1}: "
        f"{times[0][1]['reason']})"
        for name, times in absences.items()
    ]
    lasting = any(
        2 * len(times) > rounds or any(number_ == rounds - 1 for number_, _ in times)
        for times in absences.values()
    )
    answers = []
    if absent:
        who = listed([f"{name} ({why})" for name, why in absent.items()])
        answers.append(
            f"{len(absent)} of {len(fit.clients) + len(absent)} clients took no part: {who}. The "
            "result says nothing about them. Fix their rows and fit again, or treat it as a fit of "
            "the others."
        )
    if absences:
        answers.append(
            f"{len(absences)} of {len(fit.clients)} clients failed and were left out: {listed(words)}. "
            "The result is as if they had not taken part in those rounds, and their "
            "states are unchanged. Fix their rows, or fit without them (data.select)."
        )
    yield answered(
        "Was every client's update counted?",
        bool(answers),
        " ".join(answers) or "Yes: no client was left out of any round.",
        "fatal" if lasting or absent else "note",
    )


def _far_out(fit: Snapshot) -> Iterator[Check]:
    records = records_of(fit.progress.history, "far_out")
    if not records:
        return
    words = []
    for name, times in records.items():
        worst = max(float(record["times"]) for _, record in times)
        rounds = len({number_ for number_, _ in times})
        words.append(f"{name} (in {rounds} rounds, up to {number(worst)} times the median norm)")
    yield Check(
        "Are all updates of a similar size?",
        "warning",
        f"The updates of {len(records)} of {len(fit.clients)} clients were far larger than the "
        f"others of their round: {listed(words)}. They were counted. Check these clients' "
        "rows.",
    )


def _conflicting(fit: Snapshot) -> Iterator[Check]:
    compared = [record[COMPARED] for record in fit.progress.history if COMPARED in record]
    if not compared:
        return
    question = "Does every client agree with the others?"
    if not compared[-1]:
        why = (
            f"Not checked: this needs {FEWEST_COMPARED} to 2,000 clients, with local sites that are Normal "
            "given the global ones, a density of each row, and, unless that is Gaussian, "
            f"{ROWS_COMPARED} rows."
        )
        yield Check(question, "not asked", why)
        return
    words = [
        f"{name} ({number(float(one['away']))} times as far out as expected, p = "
        f"{float(one['p']):.1g})"
        for name, times in records_of(fit.progress.history, CONFLICTS).items()
        for _, one in times[-1:]
    ]
    yield answered(
        question,
        bool(words),
        f"The summaries of {len(words)} of {compared[-1]} clients conflict with what all others "
        f"predict: {listed(words)}. They are counted. Check that their outcome and columns have "
        "the others' coding and units; to see what they change, fit without them."
        if words
        else f"Yes: of {compared[-1]} clients none is improbable under the others' hierarchy.",
        "doubt" if words else "note",
    )
