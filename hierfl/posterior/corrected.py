"""Federated importance sampling: reweight and resample the guide's draws.

Let z be the global sites, and w_k and y_k client k's local sites and rows. A draw (z, w_1, ...,
w_N) of the guide has weight

    p(z) / q(z) * prod_k W_k,      W_k = p(y_k, w_k | z) / q(w_k | z).

In one more round each client returns log W_k of every draw, and the server adds them up. For each z
a client draws its local sites `inner` times, returns the log of the mean of W_k, and keeps one draw
with probability proportional to its weight. The mean is an unbiased estimate of p(y_k | z), so the
weights stay correct and vary less. The client's first draw gives k-hat of the guide. Until enough
draws are effective, more rounds take z of a Student t (`hierfl.posterior.proposals`).

Sources: Pareto smoothing and k-hat, Vehtari et al. 2024, arXiv:1507.02646; k-hat as a diagnostic of
variational posteriors, Yao, Vehtari, Simpson and Gelman 2018, arXiv:1802.02538; weights with
estimated densities, Andrieu and Roberts 2009, Annals of Statistics 37.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.core.arguments import expect_count
from hierfl.core.importance_sampling import K_HAT, Split, Weights, chosen, smoothed_rows
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.core.trees import Tree, tree_map
from hierfl.core.user_warnings import warn
from hierfl.data.batch import ClientBatch
from hierfl.posterior.client_loop import each_draw
from hierfl.posterior.draws import Draws
from hierfl.posterior.proposals import FREEDOM, points_of, refitted
from hierfl.posterior.snapshot import Snapshot, expect_fit
from hierfl.posterior.weights import INNER, Weighed, check_density, check_labeled, over_own, weigh
from hierfl.program.program import Params

ROUNDS = 3  # at most
ENOUGH = 1000  # effective draws that make another round needless
LEAST_PROPOSALS = 100  # a Pareto tail is fitted to the largest weights, 20 of 100
POINTS, AT_POINT = 10, 400  # draws of z, and of local sites at each, that judge a client's guide
EQUAL = 1e-6  # log weights this close are equal up to rounding, and have no tail


@printed
@dataclass(frozen=True, eq=False)
class Corrected:
    """Importance-resampled draws of the posterior, and how far to trust them.

    Args:
        draws: resampled, in random order.
        k_hat: Pareto shape of the weights used; 0.7 or more means do not trust the draws, 0 means
            all weights are equal.
        k_hat_guide: Pareto shape of the weights of the guide's own single draws, all sites
            together: how good the guide alone is.
        k_hat_clients: by client, Pareto shape of its local sites given the global ones, averaged
            over draws of the latter; NaN for a client without local sites.
        effective: effective number of proposals, 1 / sum of squared normalized weights.
        log_evidence: log p(y), nats.
        proposals: number of draws that were weighted.
        rounds: number of rounds taken.
    """

    draws: Draws
    k_hat: float
    k_hat_guide: float
    k_hat_clients: pd.Series
    effective: float
    log_evidence: float
    proposals: int
    rounds: int

    def __tables__(self) -> Shown:
        values: dict[str, Any] = {
            "k-hat of the weights": self.k_hat,
            "k-hat of the guide": self.k_hat_guide,
            "effective draws": self.effective,
            "weighted draws": self.proposals,
            "rounds": self.rounds,
            "log evidence, nats": self.log_evidence,
        }
        worst = self.k_hat_clients.dropna()
        if len(worst):
            values[f"k-hat of client '{worst.idxmax()}', the worst"] = float(worst.max())
        bad = self.k_hat >= K_HAT
        return Shown(
            f"{self.draws.count} resampled draws",
            pd.DataFrame({"value": values}, dtype=object),
            f"The weights' k-hat is {'not ' if bad else ''}below {K_HAT}: "
            f"{'do not trust the draws' if bad else 'the draws can be trusted'}.",
        )


@one_at_a_time
def corrected(
    fit: Snapshot,
    draws: int = 1000,
    *,
    proposals: int | None = None,
    inner: int = INNER,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Corrected:
    """Resample the guide's draws by Pareto-smoothed weights; warn if k-hat >= 0.7."""
    expect_fit(fit)
    for name, value in (("draws", draws), ("inner", inner), ("rounds", rounds)):
        expect_count(value, name)
    count = max(2 * draws, 4000) if proposals is None else proposals
    expect_count(count, "proposals", least=LEAST_PROPOSALS)
    weighted, weights, log_ratio, guide = in_rounds(
        fit, count, inner=inner, rounds=rounds, enough=draws, seed=seed
    )
    total = len(log_ratio)
    if weights.k_hat >= K_HAT:
        warn(
            f"k-hat is {weights.k_hat:.2f}, above {K_HAT}: the guide misses a part of the "
            f"posterior, and weights cannot make up for it ({weights.effective:.0f} of {total} "
            "draws are effective). Do not trust tails and spreads. Run more rounds, use a "
            "closer guide (guides.conditional, or structured with a non-centered model), or "
            "methods.fedlaplace",
        )
    order = torch.from_numpy(np.random.default_rng(seed).permutation(draws))
    which = chosen(weights.log, draws)[order]
    return Corrected(
        draws=weighted.draws.some(which),
        k_hat=weights.k_hat,
        k_hat_guide=guide.k_hat,
        k_hat_clients=own_k_hat(fit, seed=seed),
        effective=weights.effective,
        log_evidence=float(log_ratio.double().logsumexp(0)) - math.log(total),
        proposals=total,
        rounds=total // count,
    )


def in_rounds(
    fit: Snapshot,
    count: int,
    *,
    inner: int,
    rounds: int,
    enough: int,
    seed: int,
    tail: float = math.inf,
    more: int = 4,
) -> tuple[Weighed, Weights, Tensor, Weights]:
    """Weight draws as of the mixture of all rounds' proposals (Veach and Guibas 1995; Owen and Zhou 2000)."""
    weighted = weigh(fit, count, inner=inner, seed=seed)
    proposals: list[Split] = []
    log_ratio = weighted.total
    weights = posterior_weights(log_ratio)
    guide = posterior_weights(weighted.raw)
    fits = 0 < 2 * weighted.at.shape[1] < count  # enough draws to estimate a covariance
    while (
        fits
        and len(proposals) + 1 < rounds
        and (weights.effective < min(enough, ENOUGH) or weights.k_hat > tail)
    ):
        proposals.append(refitted(weighted.at, weights, proposals[-1] if proposals else None))
        points = points_of(proposals[-1], count, seed=seed + len(proposals))
        salt = f"psis {len(proposals)}"
        try:
            further = weigh(fit, count, inner=more * inner, seed=seed, points=points, salt=salt)
        except (RuntimeError, ValueError) as error:
            warn(
                f"only {weights.effective:.0f} draws are effective, and there is no further round: "
                f"the guide fails at points farther out than its own draws ({error})",
            )
            proposals.pop()
            break
        weighted = tree_map(lambda *parts: torch.cat(parts), weighted, further)
        densities = torch.stack(
            [weighted.log_q, *(p.log_prob(weighted.at, FREEDOM) for p in proposals)]
        )
        log_ratio = (
            weighted.total + weighted.log_q - (densities.logsumexp(0) - math.log(len(densities)))
        )
        weights = posterior_weights(log_ratio)
    return weighted, weights, log_ratio, guide


def posterior_weights(total: Tensor) -> Weights:
    """Pareto-smooth log weights (S,); weights that differ by rounding alone are made equal."""
    log, k_hat, effective = weights_of_rows(total[None])
    return Weights(log[0], float(k_hat), float(effective))


def weights_of_rows(total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log weights (n, S), k-hats (n,) and effective numbers (n,), as `posterior_weights` does."""
    count, span = total.shape[1], total.amax(1) - total.amin(1)
    rounding = 64.0 * torch.finfo(total.dtype).eps * total.abs().amax(1)  # of sums of many terms
    same = span < rounding.clamp(min=EQUAL)
    log, k_hat, effective = smoothed_rows(total)
    log = torch.where(same[:, None], -math.log(count), log)
    return log, k_hat.where(~same, 0.0), effective.where(~same, float(count))


def own_k_hat(fit: Snapshot, *, points: int = POINTS, seed: int = 0) -> pd.Series:
    """Estimate k-hat of each client's local sites, averaged over draws of the global ones."""
    check_labeled(fit)
    index = pd.Index(fit.clients, name="client")
    if not fit.program.latents.local_block.size:
        return pd.Series(np.nan, index=index, name="k_hat")
    check_density(fit, shared=False)

    def one(params: Params, own: ClientBatch, batch: ClientBatch) -> Tree:
        return {"log": over_own(fit.program, params, own, AT_POINT)[2]}

    chunks = each_draw(fit, one, draws=points, seed=seed, width=AT_POINT)
    k_hats = [
        float(weights_of_rows(client)[1].mean())
        for chunk in chunks
        for client in chunk.found["log"]
    ]
    return pd.Series(k_hats, index=index, name="k_hat")
