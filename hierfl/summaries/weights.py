"""Weights of the draws of the server of two_stage, and which clients' weights have a heavy tail.

The likelihood of a client without an event is flat on one side; draws of the surrogate miss a tail
there, and weights hardly show it (means were off by 0.15 sds at a k-hat of 0.51).
"""

import math

import torch
from torch import Tensor

from hierfl.core.gaussians import least_squares_solution
from hierfl.core.importance_sampling import K_HAT, Weights, resampled, smoothed_rows
from hierfl.core.importance_sampling import smoothed as pareto_smoothed
from hierfl.core.trees import tree_class

ROUNDING = 1e-9  # log weights that differ by no more are equal
# Nats of a tail's largest weight above the mean: with no weight twice the mean, the tail adds
# nothing, and k-hat misleads (above 0.7 in 30 of 200 sets, 99.8% of whose draws were effective).
TAIL = math.log(2.0)
LEAST_ASKED, TIMES = 100, 6  # draws for a quadratic, and as many as its coefficients times
PASSES, LEAST_SHARE = 4, 0.4  # of the fit of a quadratic; of the draws asked for, effective in it
HEAVY, FAR = 0.3, 1.5  # k-hat, and nats of the largest over the mean, of heavy weights
LIGHT = 0.2  # k-hat of weights that are not heavy any more


@tree_class
class Points:
    """Weighted draws of z, and of clients' mixing variables."""

    draws: Tensor  # (S, K)
    log_p: Tensor  # (S,) log density that they were drawn from, up to a constant
    log_weights: Tensor  # (S,) normalized

    @staticmethod
    def equal(draws: Tensor, log_p: Tensor | None = None) -> "Points":
        """Return draws with equal weights; a log density of zeros by default."""
        count = len(draws)
        log_p = torch.zeros(count) if log_p is None else log_p
        return Points(draws, log_p, torch.full((count,), -math.log(count)))

    def resampled(self, count: int) -> Tensor:
        """Return draws of equal weight, (`count`, K)."""
        return resampled(self.draws, self.log_weights, count)


def smoothed(log_ratios: Tensor) -> Weights:
    """Pareto-smooth log weights; k-hat is 0 where none is far above the mean, or by rounding."""
    span, size = float(log_ratios.max() - log_ratios.min()), float(log_ratios.abs().max())
    if math.isfinite(size) and span <= ROUNDING * max(1.0, size):
        count = len(log_ratios)
        return Weights(torch.full_like(log_ratios, -math.log(count)), 0.0, float(count))
    weights = pareto_smoothed(log_ratios)
    flat = float(highest(log_ratios)) < TAIL
    return weights._replace(k_hat=0.0) if weights.k_hat >= K_HAT and flat else weights


def moments(draws: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and sds of weighted draws (S, K), (K,) each."""
    share = log_weights.exp()
    mean = share @ draws
    return mean, (share @ (draws - mean).square()).sqrt()


def error_of_sds(draws: Tensor, log_weights: Tensor) -> Tensor:
    """Return the relative Monte Carlo error of the sds of weighted draws (S, K), (K,)."""
    share = log_weights.exp()[:, None]
    squares = share * (draws - (share * draws).sum(0)).square()
    shares = (squares / squares.sum(0)).nan_to_num()  # of a number that does not move
    return 0.5 * (shares - share).square().sum(0).sqrt()


def apart(moments: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the largest shift of a mean, in sds, and the largest relative change of an sd."""
    (mean, sd), (new_mean, new_sd) = moments, other
    ratio = (new_sd / sd).log().abs().max().expm1()
    return ((new_mean - mean).abs() / new_sd).max(), ratio


def effective_share(log_weights: Tensor) -> float:
    """Return the share of points (S,) that is effective."""
    w = log_weights.softmax(0)
    return 1.0 / (len(w) * float(w.square().sum()))


def tempered(log_weights: Tensor, share: float) -> Tensor:
    """Return weights (S,) that sum to 1, raised to the power with which such a share is effective."""
    low, high = 0.0, 1.0
    for _ in range(20 if effective_share(log_weights) < share else 0):
        power = 0.5 * (low + high)
        low, high = (power, high) if effective_share(power * log_weights) > share else (low, power)
    return (high * log_weights).softmax(0)


# ------------------------------------------------------------------------------ of many clients
def k_hats_of(log_ratios: Tensor) -> Tensor:
    """Return k-hat of each client's weights (N,), of log ratios (S, N); 0 where there is no tail."""
    k_hats, tails = torch.zeros(log_ratios.shape[1]), highest(log_ratios) > TAIL
    k_hats[tails] = smoothed_rows(log_ratios[:, tails].mT)[1].to(k_hats.dtype)
    return k_hats


def asked_of(size: int, limit: int) -> int:
    """Return how many draws of z (K = `size`) a quadratic needs to be fitted and tested."""
    return min(limit, max(LEAST_ASKED, TIMES * (size + 1) * (size + 2) // 2))


def quadratic_in(x: Tensor) -> Tensor:
    """Return the terms of a quadratic of x (S, K): 1, x, and the products of two, row by row."""
    i, j = torch.triu_indices(x.shape[1], x.shape[1])
    return torch.cat([torch.ones(len(x), 1), x, x[:, i] * x[:, j]], 1)


def everywhere(
    log_ratios: Tensor, at: Tensor, draws: Tensor, log_base: Tensor
) -> tuple[Tensor, float]:
    """Return all clients' log ratio at draws (S, K), (S,), from (A,) at draws `at`; its error's sd.

    A quadratic of z is fitted where the posterior is, by log weights `log_base` (S,) + log ratios.
    """
    if len(at) == len(draws):
        return log_ratios, 0.0
    x = (draws - draws.mean(0)) / (draws.std(0) + 1e-300)
    powers = quadratic_in(x)
    terms, share = powers[at], torch.full((len(at),), 1.0 / len(at))
    for _ in range(PASSES):
        root = share.sqrt()[:, None]
        fitted = least_squares_solution(root * terms, root * log_ratios[:, None])[:, 0]
        # more effective points than coefficients, or the fit would be to a few of them
        share = tempered(terms @ fitted + log_base[at], LEAST_SHARE)
    residuals = log_ratios - terms @ fitted
    degrees = max(1e-3, 1.0 - terms.shape[1] * float(share.square().sum()))
    return powers @ fitted, float(((share * residuals.square()).sum() / degrees).sqrt())


def is_heavy(k_hats: Tensor, log_ratios: Tensor) -> Tensor:
    """Return which clients' weights are heavy, (N,), by k-hats (N,) and log ratios (S, N)."""
    return (k_hats > HEAVY) & (highest(log_ratios) > FAR)


def highest(log_ratios: Tensor) -> Tensor:
    """Return by how much the largest weights of (S, ...) exceed their means, in nats."""
    return log_ratios.max(0).values - log_ratios.logsumexp(0) + math.log(len(log_ratios))
