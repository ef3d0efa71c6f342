"""Checks of the run, the posterior and the clients. Every warning rests on something measured on this fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from torch import Tensor

from hierfl.core.importance_sampling import K_HAT
from hierfl.posterior.learned import learned_params
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.sites import Family
from hierfl.report.blocks import FEW_ROWS, Check, answered, listed, number
from hierfl.report.checks_of_predictions import predictions, strangers
from hierfl.report.checks_of_rounds import chains_of_rounds, clients_of_rounds
from hierfl.report.measurements import Measured

UNCERTAINTY = "Does every parameter have an uncertainty?"
OF_FACTORS = "from_factor"  # the guide of two_stage, which is not fitted
LITTLE = 0.1  # nats: divergence of two Normals of equal sd, 0.45 sd apart; too little to tell clients apart


def checks(found: Measured) -> list[Check]:
    """Return all checks, in the order of the page."""
    return [
        check
        for ask in (_run, _posterior, _clients, predictions, strangers)
        for check in ask(found)
    ]


# ------------------------------------------------------------------------------------------------ the run
def _run(found: Measured) -> Iterator[Check]:
    """Check the training run."""
    yield _participation(found)
    yield _converged(found)
    yield from _validation_score(found)
    yield from _concentration(found)
    yield from chains_of_rounds(found.fit)
    yield from clients_of_rounds(found.fit)


def _participation(found: Measured) -> Check:
    """Check the mean number of rounds per client: at least 5, or all rounds of a shorter run."""
    history, fit = found.fit.history, found.fit
    asked = (
        float(history["clients"].sum()) / len(fit.clients)
        if "clients" in history
        else float(len(history))
    )
    needed = min(5, len(history))
    return answered(
        "Did the clients take part in enough rounds?",
        asked < needed,
        f"On average, a client took part in {number(asked)} rounds"
        + (
            f", fewer than {needed}: some clients may never have taken part."
            if asked < needed
            else "."
        ),
    )


def _converged(found: Measured) -> Check:
    """Report the verdict of `hierfl.diagnostics.convergence`."""
    question = "Has the run converged?"
    if isinstance(found.run, str):
        return Check(question, "not asked", _sentence(found.run))
    if found.run.answer == "cannot be judged":
        return Check(question, "not asked", found.run.verdict)
    return answered(question, not found.run.converged, found.run.verdict)


def _validation_score(found: Measured) -> Iterator[Check]:
    """Warn if the held-out score has fallen by more than 0.01 nats per row since its best round."""
    history = found.fit.history
    if "validation_log_score" not in history:
        return
    scores = history.set_index("round")["validation_log_score"].dropna()
    fallen = float(scores.max() - scores.iloc[-1])
    yield answered(
        "Is the held-out score still near its best?",
        fallen > 0.01,
        f"The held-out log score was best after round {int(scores.idxmax()) + 1} of {len(history)}"
        + (
            f", and has fallen by {number(fallen)} nats per row since: the fit may be overfitting "
            "the training rows."
            if fallen > 0.01
            else "."
        ),
    )


def _concentration(found: Measured) -> Iterator[Check]:
    """Warn if the effective number of clients is below 1.5 or a tenth of those that took part."""
    history = found.fit.history
    if "effective_clients" not in history:
        return
    effective, took_part = (
        float(history["effective_clients"].iloc[-1]),
        float(history["clients"].iloc[-1]),
    )
    alone = took_part > 1 and effective < max(1.5, 0.1 * took_part)
    yield answered(
        "Do all clients contribute to the result?",
        alone,
        f"The weights of the last round are equivalent to {number(effective)} equally weighted "
        f"clients, of {took_part:.0f} that took part"
        + (
            ": a few clients dominate the result. Weight clients by their number of rows instead."
            if alone
            else "."
        ),
    )


# ---------------------------------------------------------------------------------------------- the posterior
def _posterior(found: Measured) -> Iterator[Check]:
    """Check the draws of the posterior."""
    if found.draws is None:
        size = found.fit.program.latents.local_block.size
        yield Check(
            UNCERTAINTY,
            "not asked",
            "There are no posterior draws to examine: too few were requested, or the model is "
            f"too large to hold enough of them ({size:,} parameters per client).",
        )
        return
    sites = {**found.draws.shared, **found.draws.own}
    yield from _not_finite(sites)
    program = found.fit.program
    points = [
        s.name for s in program.latents.sites if bool((sites[s.name] == sites[s.name][:1]).all())
    ] + [spec.name for spec in learned_params(found.fit)]
    yield _uncertainty(points)
    yield from _guide(found)
    yield from _scales(found, points)


def _not_finite(sites: Mapping[str, Tensor]) -> Iterator[Check]:
    """Warn of sites with draws that are not finite."""
    bad = [name for name, value in sites.items() if not bool(value.isfinite().all())]
    if bad:
        yield Check(
            "Are all draws finite?",
            "warning",
            f"Some draws of {listed(bad)} are not finite: no result that involves them can be trusted.",
        )


def _uncertainty(points: list[str]) -> Check:
    """Warn of point estimates, given their names."""
    return answered(
        UNCERTAINTY,
        bool(points),
        f"No: {listed(points)} "
        f"{'is a point estimate' if len(points) == 1 else 'are point estimates'}, and no interval "
        f"on this page includes {'its' if len(points) == 1 else 'their'} uncertainty."
        if points
        else "Yes: no parameter of the model is a point estimate.",
    )


def _scales(found: Measured, points: list[str]) -> Iterator[Check]:
    """Warn of a mean-field guide if global scales (positive sites without an upper bound) are inferred."""
    scales = [
        s.name
        for s in found.fit.program.latents.global_block.sites
        if not _reaches_below_0(s.support) and s.name not in points
    ]
    if not scales:
        return
    guide = found.fit.method.guide
    family = guide.__name__ if isinstance(guide, Family) else None  # type: ignore[attr-defined]
    question = "Does the guide let the global scales depend on the clients' parameters?"
    if family == "mean_field":
        yield Check(
            question,
            "warning",
            "No: the mean-field guide treats all parameters as independent, so its intervals for "
            f"{listed(scales)} are usually too narrow. guides.structured and guides.conditional "
            "do not assume independence.",
        )
    elif family is not None:
        where = (
            f"in draws of {found.fit.method.name}"
            if family == OF_FACTORS
            else f"in the guide ({family})"
        )
        yield Check(
            question,
            "good",
            f"Yes: {where}, the clients' parameters depend on {listed(scales)}.",
        )
    else:
        yield Check(
            question,
            "not asked",
            "The guide is user-defined: what it treats as independent cannot be read from it.",
        )


def _guide(found: Measured) -> Iterator[Check]:
    """Check the Pareto k-hat of the guide, from the method's own history if that has one."""
    question, history = (
        "Is the guide (the approximate posterior) close enough to the posterior for importance "
        "weights to correct it?",
        found.fit.history,
    )
    if "k_hat" in history and bool(
        history["k_hat"].notna().any()
    ):  # the method has weighted its draws itself
        yield answered(question, *_own_weights(found.fit))
        return
    if isinstance(found.weighed, str):
        yield Check(question, "not asked", _sentence(found.weighed))
        return
    weighed = found.weighed
    yield answered(
        question,
        weighed.k_hat_guide >= K_HAT,
        f"The effective sample size is {number(weighed.effective, 2)} of {weighed.proposals} "
        f"draws, and the Pareto k-hat is {number(weighed.k_hat_guide, 2)}{_far(weighed.k_hat_guide)}.",
    )
    own = weighed.k_hat_clients.dropna()
    if len(own):
        bad = own[own >= K_HAT]
        yield answered(
            "Is the guide close enough for every client's own parameters, given the global ones?",
            bool(len(bad)),
            f"The Pareto k-hat is not below {K_HAT} for {len(bad)} of {len(own)} clients: "
            f"{listed([f'{n} {number(k, 2)}' for n, k in bad.items()])}."
            if len(bad)
            else f"The largest Pareto k-hat of any client is {number(float(own.max()), 2)}, below "
            f"{K_HAT}.",
        )


def _own_weights(fit: Snapshot) -> tuple[bool, str]:
    """Return whether the weights that a method has taken itself are bad, and a sentence on them."""
    last = fit.history.ffill().iloc[-1]
    k_hat = float(last["k_hat"])
    words = f"The Pareto k-hat of the method's own importance weights is {number(k_hat, 2)}"
    if "effective" in last:
        words += f", and {float(last['effective']):.0f} draws are effective"
    if "k_hat_client" in last:
        words += f"; the largest k-hat of one client's weights is {number(float(last['k_hat_client']), 2)}"
    if k_hat < K_HAT:
        return False, f"{words}. The draws on this page are weighted."
    return True, (
        f"{words}. A k-hat not below {K_HAT} means that the weighted approximation misses part of the "
        "posterior: do not trust the spreads and tails on this page. Tighter priors of the clients' "
        "parameters may help."
    )


def _far(k_hat: float) -> str:
    """Return the second half of a sentence that warns of a k-hat of 0.7 or more; empty below that."""
    if k_hat < K_HAT:
        return ""
    return (
        f", not below {K_HAT}: the guide misses part of the posterior, so the spreads and tails "
        "on this page are the guide's and not the posterior's. fit.posterior(correct='psis') "
        "corrects the draws in further rounds; that may do better, and it reports whether it did"
    )


def _sentence(words: str) -> str:
    """Start with a capital letter and end with a full stop."""
    return f"{words[0].upper()}{words[1:]}" + ("" if words.endswith(".") else ".")


def _reaches_below_0(support: object) -> bool:
    """Return False for a support with a lower bound of 0 or more and no upper bound, otherwise True."""
    support = getattr(support, "base_constraint", support)
    bound = getattr(support, "lower_bound", None)
    return (
        bound is None or hasattr(support, "upper_bound") or float(np.min(np.asarray(bound))) < 0.0
    )


# ------------------------------------------------------------------------------------------------ the clients
def _clients(found: Measured) -> Iterator[Check]:
    """Check the number of rows of each client, and how much those rows add to the global prior."""
    counts, names = found.fit.federation.data.counts.tolist(), found.fit.clients
    few = [
        f"{name}: {count}" for name, count in zip(names, counts, strict=True) if count < FEW_ROWS
    ]
    yield answered(
        "Does every client have enough rows?",
        bool(few),
        f"{len(few)} of {len(names)} clients have fewer than {FEW_ROWS} rows ({listed(few)}): "
        "these rows are too few to show how well the model fits those clients."
        if few
        else f"Yes: the smallest client has {min(counts)} rows.",
    )
    if found.told is None:
        return
    nats = found.told["nats"]
    silent = nats[nats < LITTLE]
    yield answered(
        "Do the clients' own rows inform their estimates?",
        bool(len(silent)),
        f"The own rows of {len(silent)} of {len(names)} clients ({listed(list(silent.index))}) "
        f"add less than {LITTLE} nats of information: the posterior of such a client is nearly "
        "the global prior, which is what would be predicted for any client."
        if len(silent)
        else f"Yes: every client's own rows add at least {number(float(nats.min()), 2)} nats of "
        "information to the global prior.",
    )
