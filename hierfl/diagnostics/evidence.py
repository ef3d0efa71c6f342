"""The evidence of a model, from draws of its posterior alone.

With f a density inside the posterior's bulk, and x the unconstrained global sites,

    1 / p(y) = E[f(x) / (p(x) prod_k p(y_k | x))],    x from the posterior

f is the draws' Gaussian inside its ellipsoid of 90%, so that no term is large where the posterior has
tails (Geweke 1999, Econometric Reviews 18; Gelfand and Dey 1994, JRSS B 56). Clients' local sites
are integrated out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from scipy.stats import chi2
from torch import Tensor

from hierfl.core.arguments import spelled
from hierfl.core.gaussians import LOG_2_PI
from hierfl.core.process import one_at_a_time
from hierfl.data.absent import RowsNotSaved
from hierfl.diagnostics.left_out import kept_densities, precise
from hierfl.posterior.corrected import corrected
from hierfl.posterior.snapshot import Snapshot, expect_fit, lacks_rows
from hierfl.posterior.weights import INNER, already_weighted
from hierfl.program.few_rows import double_precision

if TYPE_CHECKING:
    from hierfl.methods.stages.kept import Densities

BULK = 0.9  # probability of the ellipsoid


class LogEvidence(NamedTuple):
    """log p(y) in nats, and the sd of its Monte Carlo error."""

    value: float
    error: float


@one_at_a_time
@spelled
def log_evidence(fit: Snapshot, *, draws: int = 2000, seed: int = 0) -> LogEvidence:
    """Estimate log p(y), the log density of all clients' labels with every site integrated out.

    Its differences between models of the same rows are log Bayes factors. It depends on priors, also
    on vague ones: compare predictions by `hierfl.compare_models` where these are not believed.

    Args:
        fit: whose posterior can be trusted. Over nodes, or without rows, of `two_stage` alone.
        draws: S, of the posterior.
        seed: of the draws.

    Raises:
        ValueError: the guide has no density, or the server does not have what it takes.
        RowsNotSaved: it takes the rows, which were not saved with the fit.
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


def _kept(fit: Snapshot) -> tuple[Densities, Tensor] | None:
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
