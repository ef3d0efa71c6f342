"""Evidences of a model from draws of its posterior: of all labels, and of those without a row or a client.

Both evidences of p(y without i) and p(y) are means of importance weights of the same draws:

    p(y_i | y without i) = E[r] / E[r / p_i] = sum_s v_s p_i(s),
    v_s = (r_s / p_i(s)) / sum_t (r_t / p_i(t)).

r are the guide's importance weights, p_i the likelihood of what is left out at a draw. Where draws have
no weights, with f a density inside the posterior's bulk, and x the unconstrained global sites,

    1 / p(y) = E[f(x) / (p(x) prod_k p(y_k | x))],    x from the posterior

f is the draws' Gaussian inside its ellipsoid of 90%, so that no term is large where the posterior has
tails (Geweke 1999, Econometric Reviews 18; Gelfand and Dey 1994, JRSS B 56). Clients' local sites
are integrated out.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2
from torch import Tensor

from hierfl.core.arguments import spelled
from hierfl.core.gaussians import LOG_2_PI
from hierfl.core.process import double_precision, one_at_a_time
from hierfl.core.user_warnings import warn
from hierfl.data.absent import HAND_IN, NOT_SAVED, RowsNotSaved, is_absent
from hierfl.posterior.corrected import ROUNDS, corrected, in_rounds, weights_of_rows
from hierfl.posterior.draws import posterior_draws
from hierfl.posterior.labels import log_likelihoods
from hierfl.posterior.snapshot import Snapshot, expect_fit, lacks_rows
from hierfl.posterior.weights import INNER, Weighed, already_weighted, weigh

if TYPE_CHECKING:
    from hierfl.methods.stages.kept import Densities

PILOT = 100  # draws that tell how many local draws are needed
NOISE = 0.25  # variance of log weights, all clients together, that local draws may add
BIAS = 0.01  # nats of bias in a client's estimate that the noise of local draws may cause
TAIL = 0.3  # k-hat above which further rounds widen the proposal, long before 0.7
MOST = 128  # local draws for each draw of the global sites, at most
BULK = 0.9  # probability of the ellipsoid


# ------------------------------------------------------------ all labels
class LogEvidence(NamedTuple):
    """log p(y) in nats, and the sd of its Monte Carlo error."""

    value: float
    error: float


@one_at_a_time
@spelled
def log_evidence(fit: Snapshot, *, draws: int = 2000, seed: int = 0) -> LogEvidence:
    """Estimate log p(y), the log density of all clients' labels with every site integrated out.

    Differences between models of the same rows are log Bayes factors. They depend on the priors,
    even on vague ones: if you do not believe these, compare predictions with
    `hierfl.compare_models`.

    Args:
        fit: a fit whose posterior can be trusted. Over nodes, or without rows, only one of
            `two_stage`.
        draws: S, of the posterior.
        seed: of the draws.

    Raises:
        ValueError: the guide has no density, or the server does not have what this needs.
        RowsNotSaved: this needs the rows, which were not saved with the fit.
    """
    expect_fit(fit)
    kept = _kept(fit)
    if kept is not None:
        densities, log_own = kept
        log_p = densities.log_prior + densities.log_volume + log_own.sum(1)
        return _in_bulk(densities.points, log_p, densities.log_weights)
    if not already_weighted(fit):
        weighted = corrected(fit, draws, seed=seed)
        return LogEvidence(weighted.log_evidence, weighted.effective**-0.5)
    drawn = precise(fit, draws, INNER, seed)
    # of the mean weight of local draws the reciprocal is too large by their relative variance
    log_p = drawn.log_shared + (drawn.log_own + drawn.variance.log1p()).sum(1)
    with double_precision(), torch.no_grad():
        values = {name: value.double() for name, value in drawn.draws.shared.items()}
        points = torch.vmap(fit.program.latents.global_block.flatten)(values)
        return _in_bulk(points, log_p.double(), torch.full((draws,), -math.log(draws)))


def _kept(fit: Snapshot) -> "tuple[Densities, Tensor] | None":
    """Return what the server of two_stage has kept; None where that does not suffice, and rows do."""
    if not fit.method.name.startswith("two_stage"):
        return None
    try:
        return kept_densities(fit)
    except (ValueError, RowsNotSaved):
        if lacks_rows(fit):
            raise
        return None


def _in_bulk(points: Tensor, log_p: Tensor, log_weights: Tensor) -> LogEvidence:
    """Return the evidence by draws (S, K) of log weights (S,), of the log density (S,)."""
    share, size = log_weights.exp(), points.shape[1]
    centered = points - share @ points
    root = torch.linalg.cholesky(centered.mT @ (share[:, None] * centered))
    distance = torch.linalg.solve_triangular(root, centered.mT, upper=False).square().sum(0)
    inside = distance <= chi2.ppf(BULK, size)
    log_f = -0.5 * (distance + size * LOG_2_PI) - root.diagonal().log().sum() - math.log(BULK)
    log_terms = torch.where(inside, log_f - log_p, -torch.inf)
    log_mean = (log_terms + log_weights).logsumexp(0)
    spread = (share * ((log_terms - log_mean).exp() - 1.0)).square().sum().sqrt()
    return LogEvidence(-float(log_mean), float(spread))


# ------------------------------------------------------------ a row or a client left out
class LeftOutScores(NamedTuple):
    """Log likelihoods of what is left out, (S, n), log weights, (S, 1) or (S, n), and earlier `k_hat`."""

    log_likelihood: Tensor
    log_weights: Tensor
    k_hat: float = 0.0


class LeftOut(NamedTuple):
    """Leave-one-out estimates (n,) in nats; `lppd` is with the row or client in, `k_hat` the larger one."""

    elpd: NDArray[np.float64]
    lppd: NDArray[np.float64]
    k_hat: NDArray[np.float64]
    mc_se: NDArray[np.float64]


def estimated(scored: LeftOutScores) -> LeftOut:
    """Estimate every row or client left out, by Pareto-smoothed weights."""
    log_p = scored.log_likelihood.detach().double().mT
    weights = scored.log_weights.detach().double().mT
    given, k_hat, _ = weights_of_rows(weights)
    rest, k_hat_of_rest, _ = weights_of_rows(weights - log_p)
    terms = rest + log_p
    elpd = terms.logsumexp(1)
    error = ((terms - elpd[:, None]).exp() - rest.exp()).square().sum(1).sqrt()
    lppd = (given + log_p).logsumexp(1)
    k_hat = k_hat.maximum(k_hat_of_rest).clamp(min=scored.k_hat)
    return LeftOut(*(v.numpy() for v in (elpd, lppd, k_hat, error)))


def scored_rows(
    fit: Snapshot, site: str, draws: int, inner: int, correct: str | None, seed: int
) -> LeftOutScores:
    """Draw the log density of every row of an observed site."""
    if correct is None:
        drawn = posterior_draws(fit, draws=draws, seed=seed)
        likelihood = log_likelihoods(fit, drawn)[site]
        return LeftOutScores(likelihood, likelihood.new_zeros(draws, 1))
    found, weights, k_hat = _weighted(fit, draws, inner, seed)
    likelihood = log_likelihoods(fit, found.draws)[site]
    if weights.shape[1] > 1:
        data = fit.federation.data
        of_rows = site in fit.program.sites_of_rows
        weights = weights[:, data.row_client] if of_rows else weights
    usable = weights.isfinite().expand_as(likelihood)
    return LeftOutScores(likelihood.masked_fill(~usable, 0.0), weights, k_hat)


def scored_clients(
    fit: Snapshot, draws: int, inner: int, correct: str | None, seed: int
) -> LeftOutScores:
    """Draw log p(y_k | global sites), an estimate of it, of every client."""
    kept = _kept(fit)
    if kept is not None:  # the same with rows and without
        densities, log_own = kept
        return LeftOutScores(log_own, densities.log_weights[:, None], _own_k_hat(fit))
    if correct is None or already_weighted(fit):
        found = precise(fit, draws, inner, seed)
        return LeftOutScores(found.log_own, found.log_own.new_zeros(draws, 1), _own_k_hat(fit))
    found, weights, k_hat = _weighted(fit, draws, inner, seed)
    return LeftOutScores(found.log_own, weights, k_hat)


def kept_densities(fit: Snapshot) -> "tuple[Densities, Tensor]":
    """Return what the server of two_stage has kept, and log p(y_k | global sites), (S, N), of the data's clients."""
    # here: a fit with its rows does not need the server's part of two_stage
    from hierfl.methods.stages.kept import Kept, rounds_of

    if is_absent(fit.federation.data) and not fit.method.name.startswith("two_stage"):
        raise RowsNotSaved(f"{NOT_SAVED}: {HAND_IN}")
    what = "leave-one-client-out without rows"
    kept = Kept(rounds_of(fit.method, fit.program, what), fit.progress.server)
    found = kept.densities()
    if found.log_likelihood is None:
        what = (
            "clients have local sites that are not Normal, whose integrals need the clients' rows"
        )
        raise RowsNotSaved(f"{what}: {HAND_IN}")
    own = (found.log_likelihood + kept.constants())[:, fit.program.ranks]
    if not bool(own.isfinite().all()):
        name = fit.clients[int((~own.isfinite()).sum(0).argmax())]
        what = f"the likelihood of client '{name}', as the server has it, is not finite"
        raise RowsNotSaved(f"{what}: {HAND_IN}")
    return found, own


def _weighted(
    fit: Snapshot, draws: int, inner_most: int, seed: int
) -> tuple[Weighed, Tensor, float]:
    """Return draws and log weights that make them the posterior's, (S, 1) or (S, N)."""
    noise = _noise(fit, seed, shared=not already_weighted(fit))
    if already_weighted(fit):
        inner = min(inner_most, _enough(float(noise.max()), BIAS))
        weighted = weigh(fit, draws, inner=inner, seed=seed, shared=False)
        return weighted, weighted.log_own.new_zeros(draws, 1), _own_k_hat(fit)
    inner = min(inner_most, _enough(float(noise.sum()), NOISE))
    weighted, _, log_ratio, _ = in_rounds(
        fit, draws, inner=inner, rounds=ROUNDS, enough=draws // 4, seed=seed, tail=TAIL
    )
    if fit.program.latents.global_block.size:
        return weighted, log_ratio[:, None], 0.0
    return weighted, weighted.log_own, 0.0  # nothing is shared: other clients' weights are noise


def precise(fit: Snapshot, draws: int, inner_most: int, seed: int) -> Weighed:
    """Draw p(y_k | z) with so many local draws that its reciprocal has hardly any bias."""
    inner_most = max(inner_most, MOST)
    inner = min(inner_most, _enough(float(_noise(fit, seed, shared=False).max()), BIAS))
    weighted = weigh(fit, draws, inner=inner, seed=seed, shared=False)
    # the pilot may have seen too few
    if inner < inner_most and float(weighted.variance.mean(0).max()) > BIAS:
        inner = inner_most
        weighted = weigh(fit, draws, inner=inner, seed=seed, shared=False)
    bias = weighted.variance.mean(0)
    if inner > 1 and float(bias.max()) > 2.0 * BIAS:
        name = fit.clients[int(bias.argmax())]
        warn(
            f"after {inner} draws of the local sites the likelihood of client '{name}' is still "
            f"noisy, and its elpd too low by about {float(bias.max()):.2f} nats: use more, "
            f"inner={4 * inner}"
        )
    return weighted


def _noise(fit: Snapshot, seed: int, *, shared: bool) -> Tensor:
    """Return the relative variance of a single local draw's weight, (N,), from a pilot."""
    few = weigh(fit, PILOT, inner=INNER, seed=seed, shared=shared, salt="pilot")
    return few.variance.mean(0) * INNER


def _enough(variance: float, target: float) -> int:
    """Return how many draws bring a variance down to the one that is wanted."""
    return max(1, math.ceil(variance / target - 1e-6))


def _own_k_hat(fit: Snapshot) -> float:
    """Return k-hat of the weights that the method itself has used; 0 if it has used none."""
    own = fit.federation.server.weighted(fit.progress.server) if already_weighted(fit) else None
    return 0.0 if own is None or math.isnan(own.k_hat) else own.k_hat
