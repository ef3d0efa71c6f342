"""How surprising each client's factor is under the hierarchy fitted to all other clients.

Given u, what the likelihood reads of z itself, client k's factor is one of w alone:

    exp(eta . w - w' Lambda w / 2)
    eta = eta_w - Lambda_wu u,    eta | w ~ Normal(Lambda w, Lambda)

Let U D U' = Lambda, with the eigenvalues above 0. Under the other clients e = D^(-1/2) U' eta has
the density

    mean over z ~ p(z | factors of the others) of
        Normal(e; D^(1/2) U' E[w | z], I + D^(1/2) U' Cov[w | z] U D^(1/2))

For a Gaussian likelihood Lambda and eta are those at its starting scale, and the I above is g^2 I
(`hierfl.summaries.exact`).

The surprise is the probability that (e - m)' M^(-1) (e - m) is as large as it is, with m and M the
mean and covariance of that mixture. Given z the square is approximated by a scaled chi-square of
its own mean and variance (Satterthwaite 1946, doi:10.2307/3002019), so that draws with wide spreads
give the tail its weight. It is a leave-one-out predictive p-value (Marshall and Spiegelhalter 2007,
doi:10.1214/07-BA218); that factors stand in for rows is hierfl's choice.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.importance_sampling import K_HAT, smoothed_rows
from hierfl.method import Surprise
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.sampling import LEAST_SHARE, Start, SurrogateDraws, by_importance
from hierfl.summaries.surrogate import Surrogate

DRAWS = 1000  # of z
FEWEST = 4  # clients: of fewer, nobody can say which differs from all others
MOST = 2000  # clients; of more, the server would take minutes
AGAIN = 8  # clients, at most, without whom the surrogate is resampled: each takes seconds
LIKELY = 0.5  # tail probability above which that is not worth it
SMALL = 1e-9  # eigenvalues that are nothing beside the largest
# in units of the spread of w, and of the largest: eta along what rows hardly say anything of may vary
# by more than its eigenvalue, where a likelihood is not concave
LITTLE = 0.01


@dataclass(frozen=True, eq=False)
class Known:
    """What the server knows when the factors are final."""

    surrogate: Surrogate
    factors: Factors  # of N clients
    draws: Tensor  # (S, K) of z, of the surrogate posterior
    bounds: Tensor  # of the scales, as `bounds_of` returns them
    seed: int


def surprises(posterior: Known) -> Surprise:
    """Return each client's tail probability and distance; NaN for a client that cannot be checked.

    The others' posterior is that of all, weighted by 1 / the client's marginal likelihood; if these
    weights cannot be trusted, it is resampled, for the most surprising clients.
    """
    surrogate, factors = posterior.surrogate, posterior.factors
    count, hierarchy = len(factors.shift), surrogate.hierarchy
    surprise = Surprise(*torch.full((2, count), torch.nan))
    few_or_many = not FEWEST <= count <= MOST
    # of one sum over a client's label no rows average: eta varies by more than Lambda
    sums = not all(hierarchy.program.factors.values())
    if hierarchy.mixing is not None or not hierarchy.reading.own_size or few_or_many or sums:
        return surprise
    draws = posterior.draws[:DRAWS]
    marginals = surrogate.log_marginals(draws, factors)[1]
    moments = _moments(posterior, draws)
    log_weights, k_hats, _ = smoothed_rows(-marginals.mT)
    for k, shares in enumerate(log_weights.exp()):
        surprise.p[k], surprise.away[k] = _tail(posterior, k, moments, shares)
    heavy = (k_hats >= K_HAT) & (surprise.p < LIKELY)
    for k in sorted(heavy.nonzero()[:, 0].tolist(), key=lambda k: float(surprise.p[k]))[:AGAIN]:
        others = _without(posterior, k)
        if others is None:
            surprise.p[k] = surprise.away[k] = torch.nan
            continue
        moments = _moments(posterior, others.draws)
        surprise.p[k], surprise.away[k] = _tail(posterior, k, moments, others.log_weights.exp())
    return surprise


def _without(posterior: Known, client: int) -> SurrogateDraws | None:
    """Return draws of z given the factors of all clients but one; None where they are not good."""
    at, draws = torch.tensor(client), posterior.draws
    numbers: dict[str, Any] = {
        name: value.index_fill(0, at, 0.0)
        for name, value in vars(posterior.factors).items()
        if isinstance(value, Tensor)
    }
    equal = torch.full((len(draws),), -math.log(len(draws)))
    start, count = Start(draws, equal, posterior.bounds, False), min(DRAWS, len(draws))
    seed = noise.word(f"two_stage without {client} {posterior.seed}") & 0x7FFFFFFF
    arguments = posterior.surrogate, replace(posterior.factors, **numbers), count, start, seed
    return by_importance(*arguments, final=False, least=LEAST_SHARE)


def _moments(posterior: Known, draws: Tensor) -> tuple[Tensor, ...]:
    """Return `Surrogate.moments` at draws, and the variance of noise there, 1 at the start."""
    surrogate, noise = posterior.surrogate, torch.ones(1)
    spread = surrogate.hierarchy.spread
    if spread is not None:
        noise = torch.vmap(spread.at)(draws[:, : len(surrogate.hierarchy.reading.origin)]).square()
    return *surrogate.moments(draws, draws[:, :0], posterior.factors), noise


def _tail(
    posterior: Known, client: int, moments: tuple[Tensor, ...], share: Tensor
) -> tuple[float, float]:
    """Return a client's tail probability and distance, NaN if its factor says nothing of w."""
    size = posterior.surrogate.hierarchy.reading.own_size
    precision, shift = posterior.factors.precision[client], posterior.factors.shift[client]
    mean, covariance = (of[:, client if of.shape[1] > 1 else 0] for of in moments[:2])
    sd = (share @ covariance.diagonal(dim1=-2, dim2=-1))[:size].sqrt().clamp(min=1e-150)
    values, vectors = torch.linalg.eigh(precision[:size, :size] * sd * sd[:, None])
    largest = values.max().clamp(min=1e-300)
    above = values > (SMALL * largest).maximum(LITTLE * largest.clamp(max=1.0))
    if not bool(above.any()):
        return torch.nan, torch.nan
    back = sd[:, None] * vectors[:, above] / values[above].sqrt()  # U D^(-1/2)
    turn = vectors[:, above] * values[above].sqrt() / sd[:, None]
    noise = moments[2][:, None, None]
    expected = mean[:, :size] @ turn + mean[:, size:] @ precision[size:, :size] @ back
    spread = noise * torch.eye(turn.shape[1], dtype=turn.dtype) + turn.mT @ covariance @ turn
    return _mixture_tail(shift[:size] @ back, expected, spread, share)


def _mixture_tail(
    e: Tensor, means: Tensor, covariances: Tensor, share: Tensor
) -> tuple[float, float]:
    """Return the tail probability of e (r,) under a mixture of S Normals, and its distance."""
    middle = share @ means
    away = means - middle
    total = torch.tensordot(share, covariances, 1) + away.mT @ (away * share[:, None])
    tril, failed = torch.linalg.cholesky_ex(total)
    if bool(failed):  # by rounding, where columns lie far from 0
        return torch.nan, torch.nan

    def turned(v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(tril, v, upper=False)

    square = turned((e - middle)[:, None]).square().sum()
    at = turned(away.mT).mT
    covariance = turned(turned(covariances).mT)
    mean = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) + at.square().sum(-1)
    bent = (at * (covariance @ at[..., None])[..., 0]).sum(-1)
    variance = 2.0 * covariance.square().sum((-2, -1)) + 4.0 * bent
    tails = torch.special.gammaincc(mean.square() / variance, square * mean / variance)
    return float((share * tails).sum().clamp(0.0, 1.0)), float((square / len(e)).sqrt())
