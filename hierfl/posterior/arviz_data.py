"""The ArviZ objects that `Fit.posterior`, `Fit.posterior_predictive` and `Fit.prior` return."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch

from hierfl.core.arguments import expect_count, shown
from hierfl.core.process import one_at_a_time
from hierfl.data.clients import ClientData
from hierfl.posterior.arviz_groups import Groups, attributes, drawn_groups, given_groups
from hierfl.posterior.corrected import Corrected, corrected
from hierfl.posterior.draws import posterior_draws, prior_draws
from hierfl.posterior.labels import log_likelihoods, observed, sampled
from hierfl.posterior.snapshot import Snapshot, restricted
from hierfl.posterior.weights import WEIGHTED

OF_GUIDE = "draws of a fitted guide, not of a Markov chain: r_hat and ess do not judge them"
OF_METHOD = (
    "draws weighted and resampled by the method itself, not of a Markov chain: k_hat judges them"
)
RESAMPLED = "draws of a fitted guide, resampled by Pareto-smoothed weights, some several times"


@one_at_a_time
def posterior_data(
    fit: Snapshot,
    draws: int,
    *,
    seed: int,
    var_names: Collection[str] | None,
    expand: int,
    correct: Literal["psis"] | None,
    log_likelihood: bool,
) -> Any:
    """Return draws of the latent sites. Arguments and errors: `Fit.posterior`."""
    expect_count(draws, "draws")
    _check_names(var_names)
    if correct not in (None, "psis"):
        raise ValueError(f"correct is {correct!r}: it must be 'psis' or None")
    if correct is None:
        found = drawn_groups(fit, draws, seed=seed, var_names=var_names, expand=expand)
        latents = posterior_draws(fit, draws=draws, seed=seed) if log_likelihood else None
        about_draws = _about_uncorrected(fit)
    else:
        weighted = corrected(fit, draws, seed=seed)
        latents = weighted.draws
        found = given_groups(fit, "posterior", latents, var_names=var_names, expand=expand)
        about_draws = {"approximation": RESAMPLED, **_about(weighted, len(fit.clients))}
    if log_likelihood and latents is not None:
        data = fit.federation.data
        found.rows("log_likelihood", log_likelihoods(fit, latents), data)
        found.rows("observed_data", observed(fit, data), data)
    return found.arviz({**attributes(fit, seed), **about_draws})


def _about_uncorrected(fit: Snapshot) -> dict[str, Any]:
    """Return what draws are that no further round has weighted."""
    k_hats = [record["k_hat"] for record in fit.progress.history if "k_hat" in record]
    if k_hats and fit.method.name in WEIGHTED:
        return {"approximation": OF_METHOD, "k_hat": float(k_hats[-1])}
    return {"approximation": OF_GUIDE}


def _about(weighted: Corrected, clients: int) -> dict[str, Any]:
    # a client sends one log weight a proposal, and in the first round also that of a single draw
    scalars = (weighted.proposals + weighted.proposals // weighted.rounds) * clients
    return {
        "k_hat": weighted.k_hat,
        "k_hat_guide": weighted.k_hat_guide,
        "k_hat_clients": weighted.k_hat_clients.to_numpy(),
        "effective_draws": weighted.effective,
        "proposals": weighted.proposals,
        "bytes_up_psis": scalars * torch.get_default_dtype().itemsize,
        "log_evidence": weighted.log_evidence,
    }


@one_at_a_time
def predictive_data(fit: Snapshot, draws: int, *, rows: ClientData | None, seed: int) -> Any:
    """Draw labels of rows. Arguments and errors: `Fit.posterior_predictive`."""
    expect_count(draws, "draws")
    asked = fit.federation.data if rows is None else rows
    _check_drawable(fit)
    few = restricted(fit, asked)
    found = Groups(few)
    latents = posterior_draws(few, draws=draws, seed=seed)
    found.rows("posterior_predictive", sampled(few, latents, asked, seed), asked)
    known = observed(few, asked)
    if known:
        found.rows("observed_data", known, asked)
    return found.arviz(attributes(fit, seed))


@one_at_a_time
def prior_data(
    fit: Snapshot,
    draws: int,
    *,
    seed: int,
    var_names: Collection[str] | None,
    expand: int,
    predictive: bool,
) -> Any:
    """Return draws of the latent sites from the prior. Arguments and errors: `Fit.prior`."""
    expect_count(draws, "draws")
    _check_names(var_names)
    drawn = prior_draws(fit, draws=draws, seed=seed)
    found = given_groups(fit, "prior", drawn, var_names=var_names, expand=expand)
    if predictive:
        _check_drawable(fit)
        data = fit.federation.data
        found.rows("prior_predictive", sampled(fit, drawn, data, seed), data)
        found.rows("observed_data", observed(fit, data), data)
    return found.arviz(attributes(fit, seed))


def _check_drawable(fit: Snapshot) -> None:
    """Refuse to draw labels where the likelihood has factors alone; the error names the factor."""
    if not fit.program.labels:
        fit.program.observed_site(None)


def _check_names(var_names: object) -> None:
    if var_names is not None and not isinstance(var_names, Collection):
        raise TypeError(
            f"var_names is {shown(var_names)}: it must be a list of names, or None for all"
        )
