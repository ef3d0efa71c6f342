"""What is asked of a fit, and what the answer is in plain words: each warning is of something measured here."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyro
import torch
from pyro import poutine

from hierfl.posterior.corrected import K_HAT
from hierfl.program.handlers import Answer, untouched_store
from hierfl.program.program import Program
from hierfl.program.sites import Family
from hierfl.report.blocks import FEW_ROWS, Check, answered, listed, number
from hierfl.report.checks_of_predictions import predictions, strangers
from hierfl.report.measurements import Measured

LITTLE = 0.1  # nats: two Normals of one width that lie 0.45 sd apart; what hardly tells a client from any other


def checks(found: Measured) -> list[Check]:
    """All of them, in the order of the page."""
    return [
        check
        for ask in (_run, _posterior, _clients, predictions, strangers)
        for check in ask(found)
    ]


# ------------------------------------------------------------------------------------------------ the run
def _run(found: Measured) -> Iterator[Check]:
    history, fit = found.fit.history, found.fit
    asked = (
        float(history["clients"].sum()) / len(fit.clients)
        if "clients" in history
        else float(len(history))
    )
    needed = min(5, len(history))
    yield answered(
        "Was every client asked often enough?",
        asked < needed,
        f"A client took part in {number(asked)} rounds on average"
        + (f", fewer than {needed}: some may never have been asked." if asked < needed else "."),
    )
    question = "Has the run arrived?"
    if isinstance(found.run, str):
        yield Check(question, "not asked", _sentence(found.run))
    else:
        yield answered(question, not found.run.converged, found.run.verdict)
    if "held_out_log_score" in history:
        scores = history.set_index("round")["held_out_log_score"].dropna()
        fallen = float(scores.max() - scores.iloc[-1])
        yield answered(
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
        effective, took_part = (
            float(history["effective_clients"].iloc[-1]),
            float(history["clients"].iloc[-1]),
        )
        alone = took_part > 1 and effective < max(1.5, 0.1 * took_part)
        yield answered(
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
        yield Check(
            question, "not asked", f"A client has {size:,} numbers: too many to draw and hold here."
        )
        return
    sites = {**found.draws.shared, **found.draws.own}
    bad = [name for name, value in sites.items() if not bool(value.isfinite().all())]
    if bad:
        yield Check(
            "Are all draws finite?",
            "warning",
            f"Draws of {listed(bad)} are not finite: nothing about them can be trusted.",
        )
    program = found.fit.program
    points = [
        s.name for s in program.latents.sites if bool((sites[s.name] == sites[s.name][:1]).all())
    ] + _params_of(program)
    yield answered(
        question,
        bool(points),
        f"No: {listed(points)} {'is a point estimate' if len(points) == 1 else 'are point estimates'}, and no interval here holds the "
        f"uncertainty of {'it' if len(points) == 1 else 'them'}."
        if points
        else "No site of the model is a point estimate.",
    )
    yield from _guide(found)
    scales = [
        s.name
        for s in program.latents.global_block.sites
        if not _reaches_below_0(s.support) and s.name not in points
    ]
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
            yield Check(
                question,
                "good",
                f"The guide ({family}) lets the clients' numbers depend on {listed(scales)}.",
            )
        else:
            yield Check(
                question,
                "not asked",
                "The guide is one's own: what it takes to be independent is not read off it.",
            )


def _guide(found: Measured) -> Iterator[Check]:
    question, history = (
        "Is the guide near enough to the posterior for weights to make up the rest?",
        found.fit.history,
    )
    if "k_hat" in history and bool(
        history["k_hat"].notna().any()
    ):  # a method that has weighed its draws already
        k_hat = float(history["k_hat"].dropna().iloc[-1])
        yield answered(
            question,
            k_hat >= K_HAT,
            f"k-hat of the method's own weights is {number(k_hat, 2)}{_far(k_hat)}.",
        )
        return
    if isinstance(found.weighed, str):
        yield Check(question, "not asked", _sentence(found.weighed))
        return
    weighed = found.weighed
    yield answered(
        question,
        weighed.k_hat_guide >= K_HAT,
        f"{number(weighed.effective, 2)} of {weighed.proposals} draws are effective, and k-hat is {number(weighed.k_hat_guide, 2)}"
        f"{_far(weighed.k_hat_guide)}.",
    )
    own = weighed.k_hat_clients.dropna()
    if len(own):
        bad = own[own >= K_HAT]
        yield answered(
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
        f", above {K_HAT}: the guide misses a part of the posterior, so that spreads and tails here are the guide's. Draws "
        f"that are corrected in more rounds, fit.posterior(correct='psis'), may do better, and say whether they do"
    )


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}" + ("" if words.endswith(".") else ".")


def _params_of(program: Program) -> list[str]:
    """The model's own params: learned, but no sites."""
    above, mine = program.start()
    params, batch = {**above, **mine}, program.prototype
    with untouched_store(), torch.no_grad(), pyro.validation_enabled(False):
        given = poutine.condition(
            program.model, data=program.draw(params, batch)
        )  # a prior need not be one to draw from
        with Answer(params, batch):
            nodes = poutine.trace(given).get_trace(batch).nodes
    return [name for name, node in nodes.items() if node["type"] == "param"]


def _reaches_below_0(support: object) -> bool:
    """Whether a support is other than all positive numbers."""
    support = getattr(support, "base_constraint", support)
    bound = getattr(support, "lower_bound", None)
    return (
        bound is None or hasattr(support, "upper_bound") or float(np.min(np.asarray(bound))) < 0.0
    )


# ------------------------------------------------------------------------------------------------ the clients
def _clients(found: Measured) -> Iterator[Check]:
    counts, names = found.fit.federation.data.counts.tolist(), found.fit.clients
    few = [
        f"{name}: {count}" for name, count in zip(names, counts, strict=True) if count < FEW_ROWS
    ]
    yield answered(
        "Has every client rows enough?",
        bool(few),
        f"{len(few)} of {len(names)} clients have fewer than {FEW_ROWS} rows ({listed(few)}): how well the model fits them cannot be "
        f"told from their rows."
        if few
        else f"The smallest has {min(counts)}.",
    )
    if found.told is None:
        return
    nats = found.told["nats"]
    silent = nats[nats < LITTLE]
    yield answered(
        "Do clients' own rows say much about them?",
        bool(len(silent)),
        f"{len(silent)} of {len(names)} clients ({listed(list(silent.index))}) tell less than {LITTLE} nats about themselves: their "
        f"posterior is nearly what would be said of any client."
        if len(silent)
        else f"The least that a client's rows add to what the global level expects of it is {number(float(nats.min()), 2)} nats.",
    )
