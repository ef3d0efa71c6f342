"""Draws of the surrogate posterior: of the scales s, then of the means m given s.

The few scales are importance-sampled from a proposal fitted to its own weighted points; where that
fails, and for clients' many mixing numbers, Hamiltonian chains run instead.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.chains import LEAPS, Sampled, Whitening, sampled
from hierfl.core.gaussians import least_squares_solution
from hierfl.core.importance_sampling import (
    FLAT,
    FLAT_SHARE,
    ScalesProposal,
    chosen,
    fitted,
    normal_points,
    resampled,
)
from hierfl.core.process import about_to, working
from hierfl.core.traced import WorkCounter
from hierfl.core.user_warnings import warn
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.surrogate import Density, Surrogate, with_digits
from hierfl.summaries.weights import (
    effective_share,
    highest,
    moments,
    quadratic_in,
    smoothed,
    tempered,
)

# importance sampling: points of a turn by the number of scales, turns, and points a kept draw
PILOT, TURNS, MORE = ((4, 512), (12, 1024), (10**9, 2048)), 16, 3
TURNS_OF_ROUNDS = 8  # turns of all rounds, of which each takes as long as the first
LEAST_PILOT, WORK = 64, 2_000_000  # points of a turn for each scale and one, and points x clients
MANY_SCALES = 12  # more of them are tempered sooner
# share of the points that is effective, with which a turn is the last; of many scales of rough draws
ENOUGH, ENOUGH_OF_MANY = 0.8, 0.25
STEPS = 8  # in which numbers of points grow, by the number of draws
WORST_K_HAT, LEAST_SHARE = 0.6, 0.03  # of a proposal; chains run beyond
WIDER = (1.0, 1.3, 1.6)  # times the scales of a proposal, where its tails are short
MANY_CLIENTS = 4000  # with which a chain would take minutes
NARROW = 500  # clients whose posterior is so narrow beside a prior that its peak is sought
FARTHEST = 5.0  # sds from weighted points to the peak of a quadratic through them
MOMENTS = 0.3  # share of the points that is effective, with which their moments are good
FEWEST = 2.0  # effective draws of a small step, below which the posterior lies elsewhere
NEAR_ZERO = 10.0  # in logs of a scale, from its median in the prior: nearly 0
# chains by what a gradient costs, N (D + 1)^3: many cheap ones take as long as one
CHAINS = ((2e4, 128), (1e6, 32), (float("inf"), 8))
# split R-hat above which chains are run again: of draws for moments, and of those that are kept
MIXED, MIXED_WELL = 1.1, 1.05
COLD, WARM = 60, 20  # iterations of the warm-up, from the prior and from earlier draws
LEAST, MOST = 50, 400  # iterations after it, at first, and at most where R-hat asks for more


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: chains amplify rounding, which differs between numbers of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Start(NamedTuple):
    """What is known of the posterior before."""

    draws: Tensor  # (S, K + N M), of the prior or of a posterior nearby
    log_weights: Tensor  # (S,), normalized
    bounds: Tensor  # (2, Ks) beyond which scales have no digits left
    is_prior: bool  # the draws are of the prior


class SurrogateDraws(NamedTuple):
    """Draws of the surrogate."""

    draws: Tensor  # (S, K + N M), of z and, where there are some, of all mixing numbers
    log_p: Tensor  # (S,), the density of the surrogate there
    log_weights: Tensor  # (S,), normalized; equal where draws are final
    r_hat: float  # the largest split R-hat of the chains; NaN where none ran
    k_hat: float = 0.0  # of the weights of the scales; 0 where chains ran
    share: float = 1.0  # of final draws that is effective: some are drawn twice, or one by one


def bounds_of(surrogate: Surrogate, prior: Tensor) -> Tensor:
    """Return how far scales may lie, (2, Ks): one range beyond draws of the prior (S, K + N M)."""
    hierarchy = surrogate.hierarchy
    z = prior[:, : len(hierarchy.reading.origin)]
    low, high = z.min(0).values, z.max(0).values
    least = (low - (high - low)).minimum(z.median(0).values - NEAR_ZERO)
    bounds = torch.stack([least, high + (high - low)])
    return with_digits(hierarchy.program.latents.global_block, bounds)[:, hierarchy.outside]


def sample(
    surrogate: Surrogate,
    factors: Factors,
    count: int,
    start: Start,
    *,
    final: bool,
    seed: int,
    rough: bool = False,
) -> SurrogateDraws:
    """Return S = `count` draws of the surrogate posterior; `final` ones have equal weights.

    Of `rough` ones only the mean matters: no chain runs for them where scales are few.
    """
    word = noise.word(f"two_stage {seed}") & 0x7FFFFFFF
    if not surrogate.mixed:
        least = MOMENTS if len(factors.shift) < MANY_CLIENTS else LEAST_SHARE
        least = -1.0 if rough else least
        weighted = by_importance(surrogate, factors, count, start, word, final=final, least=least)
        if rough and (weighted is None or weighted.share * count < FEWEST):
            about_to("small steps have lost the posterior", partial(float, math.inf))
        if weighted is not None:
            return weighted
    g = torch.Generator().manual_seed(word)
    normal = torch.randn(count, len(surrogate.hierarchy.inside), generator=g)
    density = Density(surrogate, factors, start.bounds)
    chains = _chains(density, count, start, final, word, g)
    log_p, mean, covariance = density.at(chains.draws)
    draws, of_means = surrogate.draws(chains.draws, mean, covariance, normal)
    share, equal = min(1.0, chains.effective / count), torch.full((count,), -math.log(count))
    return SurrogateDraws(draws, log_p + of_means, equal, chains.r_hat, share=share)


# ------------------------------------------------------------------------- importance sampling
def by_importance(
    surrogate: Surrogate,
    factors: Factors,
    count: int,
    start: Start,
    seed: int,
    *,
    final: bool,
    least: float,
) -> SurrogateDraws | None:
    """Sample scales by importance; None where k-hat is high and not even a share `least` effective."""
    hierarchy = surrogate.hierarchy
    density = Density(surrogate, factors, start.bounds)
    equal = torch.full((count,), -math.log(count))
    if not len(hierarchy.outside):
        s, log_weights, k_hat, share, many = torch.zeros(count, 0), equal, 0.0, 1.0, count
        log_p, mean, covariance = (v.expand(count, *v.shape[1:]) for v in density.at(s[:1]))
    else:
        proposal, share = _adapted(density, start, final=final)
        largest = max(MORE, WORK / (count * surrogate.work))
        ratio = min(largest, max(1.0, 1.2 / share)) if final else 1.0
        many = int(count * math.ceil(STEPS * ratio) / STEPS) // 2 * 2  # rounding changes no draw
        e = normal_points(many, len(hierarchy.outside) + 1, seed=seed)
        for wider in WIDER:
            s, log_q = proposal.times(wider).at(e)
            log_p, mean, covariance = density.at(s)
            ratios = (log_p - log_q).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
            weights = smoothed(ratios)
            # of few points k-hat is rough, and moments need no tails
            share = weights.effective / many
            if share > FLAT_SHARE and float(highest(ratios)) < FLAT:
                weights = weights._replace(k_hat=0.0)
            fits = weights.k_hat < WORST_K_HAT or (not final and share > least)
            enough = share > min(least, LEAST_SHARE)
            if fits or not enough:
                break
        if not (fits and enough):
            return None
        k_hat = max(0.0, weights.k_hat)
        log_weights, none = weights.log, ~weights.log.isfinite()
        if bool(none.any()):  # they may have no density at all: the heaviest stands in their place
            at = torch.where(none, log_weights.argmax(), torch.arange(many))
            s, log_p, mean, covariance = s[at], log_p[at], mean[at], covariance[at]
        if final:  # sorted, so that what is kept is spread evenly
            order = s[:, 0].argsort(stable=True)
            at = order[chosen(log_weights[order], count)]
            s, log_p, mean, covariance = s[at], log_p[at], mean[at], covariance[at]
            log_weights = equal
    e = mean
    if mean.shape[1]:
        e = normal_points(count + count % 2, mean.shape[1], seed=seed + 1)[:count]
    e = e[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]
    draws, of_means = surrogate.draws(s, mean, covariance, e)
    effective = min(1.0, share * many / count)
    return SurrogateDraws(draws, log_p + of_means, log_weights, torch.nan, k_hat, effective)


def _adapted(density: Density, start: Start, *, final: bool) -> tuple[ScalesProposal, float]:
    """Fit a proposal to its own weighted points; also return the share that is effective."""
    s = start.draws[:, density.surrogate.hierarchy.outside]
    proposal, size = fitted(s, start.log_weights.exp()), s.shape[1]
    largest = max(LEAST_PILOT * (size + 1), WORK // density.surrogate.work)
    e = normal_points(min(largest, next(n for scales, n in PILOT if size <= scales)), size + 1)
    least, aim = (0.05, 0.1) if size <= MANY_SCALES else (0.15, 0.2)
    enough = ENOUGH if final or size <= MANY_SCALES else ENOUGH_OF_MANY
    best, stuck, low = 0.0, 0, False
    for turn in range(TURNS):
        working(f"the server samples, turn {turn} of {TURNS}")
        y, log_q = proposal.at(e)
        counts = start.is_prior and not turn and size > MANY_SCALES
        with WorkCounter() if counts else nullcontext() as counter:
            log_p = density.at(y)[0].nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        if counter is not None:
            seconds = TURNS_OF_ROUNDS * counter.seconds(recorded=False)
            about_to(f"rounds over {size} global scalars are slow", partial(float, seconds))
        log_w = log_p - log_q
        share = effective_share(log_w)
        stuck = 0 if share > 1.1 * best or low else stuck + 1
        patience = 0 if share > 0.4 else 1 if share > 0.1 else 3
        if turn and (share > enough or stuck > patience):
            break
        best, low = max(best, share), share < least
        weights = tempered(log_w, aim) if low else log_w.softmax(0)
        many = low and len(density.factors.shift) > NARROW
        proposal = (_about_peak(y, log_p, weights, e) if many else None) or fitted(y, weights)
    return proposal, share


def _about_peak(y: Tensor, log_p: Tensor, weights: Tensor, e: Tensor) -> ScalesProposal | None:
    """Fit a proposal to the quadratic through log densities at y (S, K); None if it has no peak."""
    size, (loc, scale) = y.shape[1], moments(y, weights.log())
    x, some = (y - loc) / (scale + 1e-300), weights > 0.0
    root, powers = weights[some].sqrt()[:, None], quadratic_in(x[some])
    coefficients = least_squares_solution(root * powers, root * log_p[some, None])[:, 0]
    i, j = torch.triu_indices(size, size)
    curvature = torch.zeros(size, size).index_put((i, j), -coefficients[1 + size :])
    tril, info = torch.linalg.cholesky_ex(curvature + curvature.mT)
    if bool(info) or not bool(coefficients.isfinite().all()):
        return None
    peak = torch.cholesky_solve(coefficients[1 : 1 + size, None], tril)[:, 0].clamp(
        -FARTHEST, FARTHEST
    )
    away = torch.linalg.solve_triangular(tril.mT, e[:, :size].mT, upper=True).mT
    return fitted(loc + scale * (peak + away), torch.full((len(e),), 1.0 / len(e)))


# -------------------------------------------------------------------------------------- chains
def _chains(
    density: Density, count: int, start: Start, final: bool, seed: int, g: torch.Generator
) -> Sampled:
    hierarchy = density.surrogate.hierarchy
    cost = len(density.factors.shift) * (hierarchy.reading.own_size + 1) ** 3
    chains = next(many for limit, many in CHAINS if cost <= limit)
    starts = resampled(start.draws, start.log_weights, len(start.draws))
    points = density.surrogate.scales(starts)
    dense, spread = len(hierarchy.outside), points.std(0) + 1e-9
    whitening = Whitening(points.mean(0), torch.diag(spread[:dense]), spread[dense:])
    first, warmup = points[torch.randperm(len(points), generator=g)[:chains]], WARM
    if start.is_prior:
        warmup = COLD
    least = 2 * LEAST if final else LEAST
    iterations = 0
    while True:
        iterations += warmup + least
        about_to(
            "the scales of the hierarchy need chains, which are on all rows as fast",
            partial(density.seconds, first, LEAPS * iterations),
        )
        run = sampled(
            density.gradient,
            first,
            whitening,
            draws=count,
            warmup=warmup,
            least=least,
            seed=seed,
            jumps=False,  # factors have one mode
        )
        if not run.r_hat > (MIXED_WELL if final else MIXED):
            return run
        if least >= MOST:
            warn(
                f"the server's chains have not mixed (split R-hat {run.r_hat:.2f}): do not trust "
                f"spreads; a prior that keeps scales away from infinity helps",
            )
            return run
        first, whitening, warmup, least = run.draws[-chains:], run.whitening, WARM, 2 * least
