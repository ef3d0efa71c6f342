"""Draws of a guide, weighed until they are draws of the posterior: Pareto-smoothed importance sampling, federated.

With z the global sites, w_k and y_k client k's own sites and rows, a draw (z, w_1, ..., w_N) of the guide has the weight

    p(z) / q(z) * prod_k W_k,      W_k = p(y_k, w_k | z) / q(w_k | z),

so that in one more round each client answers with one number a draw, log W_k, and the server adds them up. A client draws its own
sites `inner` times a draw of z, answers with the log of the mean of W_k over them, and keeps one, chosen by its weight: the weights
are as right as with one (the mean is an unbiased estimate of p(y_k | z)), and vary less. Where too few draws are effective, the
server asks again, at points z of a Student t fitted to the draws as they are weighed by then (`hierfl.posterior.proposals`).

Sources: the smoothing and k-hat, Vehtari et al. 2024, arXiv:1507.02646; k-hat as a judge of variational posteriors, Yao, Vehtari,
Simpson and Gelman 2018, arXiv:1802.02538; weights whose density is estimated, Andrieu and Roberts 2009, Annals of Statistics 37.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.core.importance_sampling import Split, Weights, chosen, smoothed
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.posterior.client_loop import each_draw
from hierfl.posterior.draws import Draws
from hierfl.posterior.proposals import log_density, points_of, refitted
from hierfl.posterior.snapshot import Snapshot
from hierfl.posterior.weights import (
    INNER,
    Weighed,
    check_density,
    check_labelled,
    joined,
    over_own,
    weigh,
)
from hierfl.program.program import Params

ROUNDS, ENOUGH = 3, 1000  # rounds at most, and effective draws that make another needless
K_HAT = (
    0.7  # above it no number of draws that anyone has is enough: Vehtari et al. 2024, section 3.2.4
)
LEAST_PROPOSALS = 100  # proposals: their largest weights are fitted a tail, of 20 here
POINTS, AT_POINT = 10, 400  # points z, and draws there, that judge a client's own guide
EQUAL = 1e-6  # log weights that differ by less are equal but for rounding: they have no tail to be fitted


@dataclass(frozen=True, eq=False)
class Corrected:
    """Draws of the posterior, by weights.

    Args:
        draws: resampled, in no order.
        k_hat: of the weights they were resampled by; from 0.7 on not to be trusted, 0 where all weights are equal.
        k_hat_guide: of the guide's own draws, all sites together: how good an answer it is by itself.
        k_hat_clients: by client, of its own sites given the global ones, a mean over draws of those; NaN where it has none.
        effective: number of the proposals, 1 / sum of squared weights.
        log_evidence: log p(y), nats.
        proposals: draws that were weighed.
        rounds: it took.
    """

    draws: Draws
    k_hat: float
    k_hat_guide: float
    k_hat_clients: pd.Series
    effective: float
    log_evidence: float
    proposals: int
    rounds: int


def corrected(
    fit: Snapshot,
    draws: int = 1000,
    *,
    proposals: int | None = None,
    inner: int = INNER,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Corrected:
    """Draws of the posterior from those of the guide, by Pareto-smoothed weights; a warning where they are not to be trusted.

    Args:
        fit: whose guide has a density.
        draws: wanted, resampled from the proposals: some of them come several times.
        proposals: draws a round; None: two a draw, and at least 4000.
        inner: draws of each client's own sites a proposal; four times as many in rounds after the first.
        rounds: at most; another one is asked for while fewer proposals are effective than draws are wanted (1000 are enough).
        seed: of the draws.

    Raises:
        ValueError: a guide without a density, clients without labels, fewer than 100 proposals or no draws.
    """
    count = max(2 * draws, 4000) if proposals is None else proposals
    if min(draws, inner, rounds) < 1 or count < LEAST_PROPOSALS:
        raise ValueError(
            f"draws ({draws}), inner ({inner}) and rounds ({rounds}) must be 1 or more, proposals ({count}) {LEAST_PROPOSALS} or more"
        )
    found, weights, log_ratio, guide = in_rounds(
        fit, count, inner=inner, rounds=rounds, enough=draws, seed=seed
    )
    total = len(log_ratio)
    if weights.k_hat >= K_HAT:
        warnings.warn(
            f"k-hat is {weights.k_hat:.2f}, above {K_HAT}: the guide misses a part of the posterior that weights cannot make up "
            f"for ({weights.effective:.0f} of {total} draws are effective). Do not trust tails and spreads; take more rounds, a "
            f"guide that is nearer (guides.conditional, or structured with a non-centred model), or methods.fedlaplace",
            stacklevel=2,
        )
    which = chosen(weights.log, draws)[
        torch.from_numpy(np.random.default_rng(seed).permutation(draws))
    ]
    return Corrected(
        draws=Draws(
            *(
                {name: v[which] for name, v in part.items()}
                for part in (found.draws.shared, found.draws.own)
            )
        ),
        k_hat=weights.k_hat,
        k_hat_guide=guide.k_hat,
        k_hat_clients=own_k_hat(fit, seed=seed),
        effective=weights.effective,
        log_evidence=float(log_ratio.double().logsumexp(0)) - math.log(total),
        proposals=total,
        rounds=total // count,
    )


def in_rounds(
    fit: Snapshot, count: int, *, inner: int, rounds: int, enough: int, seed: int
) -> tuple[Weighed, Weights, Tensor, Weights]:
    """All that was drawn in some rounds, its weights, the log weights before smoothing, and the weights of the guide's own draws.

    Each round's points count as draws of the mixture of all rounds' proposals (Veach and Guibas 1995; Owen and Zhou 2000).
    """
    found = weigh(fit, count, inner=inner, seed=seed)
    proposals: list[Split] = []
    log_ratio = found.total
    guide = weights = posterior_weights(log_ratio)
    fits = 0 < 2 * found.at.shape[1] < count  # a covariance is fitted to them
    while fits and len(proposals) + 1 < rounds and weights.effective < min(enough, ENOUGH):
        proposals.append(refitted(found.at, weights, proposals[-1] if proposals else None))
        points, salt = (
            points_of(proposals[-1], count, seed=seed + len(proposals)),
            f"psis {len(proposals)}",
        )
        try:
            found = joined(
                found, weigh(fit, count, inner=4 * inner, seed=seed, points=points, salt=salt)
            )
        except (RuntimeError, ValueError) as error:
            warnings.warn(
                f"only {weights.effective:.0f} draws are effective, and farther out than it draws the guide fails ({error}): there is no "
                f"further round",
                stacklevel=3,
            )
            proposals.pop()
            break
        densities = torch.stack([found.log_q, *(log_density(p, found.at) for p in proposals)])
        log_ratio = found.total + found.log_q - (densities.logsumexp(0) - math.log(len(densities)))
        weights = posterior_weights(log_ratio)
    return found, weights, log_ratio, guide


def posterior_weights(total: Tensor) -> Weights:
    """Smoothed weights of draws whose log weights (S,) are given, all alike where only rounding tells them salt."""
    if equal(total):
        return Weights(torch.full_like(total, -math.log(len(total))), 0.0, float(len(total)))
    return smoothed(total)


def own_k_hat(
    fit: Snapshot, *, points: int = POINTS, draws: int = AT_POINT, seed: int = 0
) -> pd.Series:
    """k-hat of each client's own sites given the global ones, a mean over `points` draws of those: one number a client.

    Args:
        fit: of labelled clients, its guide of the own sites with a density.
        points: draws of the global sites.
        draws: of the own sites at each.
        seed: of the draws.

    Raises:
        ValueError: a guide without a density, or clients without labels.
    """
    check_labelled(fit)
    index = pd.Index(fit.clients, name="client")
    if not fit.program.latents.local_block.size:
        return pd.Series(np.nan, index=index, name="k_hat")
    check_density(fit, shared=False)

    def one(params: Params, own: ClientBatch, asked: ClientBatch) -> Tree:
        return {"log": over_own(fit.program, params, own, draws)[2]}

    chunks = each_draw(fit, one, draws=points, seed=seed, width=draws)
    each = [
        np.mean([tail_of(at) for at in client]) for chunk in chunks for client in chunk.found["log"]
    ]
    return pd.Series(each, index=index, name="k_hat")


def tail_of(log_ratios: Tensor) -> float:
    """k-hat of log weights (S,); 0 where they are equal."""
    return 0.0 if equal(log_ratios) else smoothed(log_ratios).k_hat


def equal(log_ratios: Tensor) -> bool:
    """Whether only rounding tells log weights salt: they are sums of many terms about as large as themselves."""
    rounding = 64.0 * torch.finfo(log_ratios.dtype).eps * float(log_ratios.abs().max())
    return float(log_ratios.max() - log_ratios.min()) < max(EQUAL, rounding)
