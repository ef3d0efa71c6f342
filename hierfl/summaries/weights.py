"""Weighted draws of the server of two_stage."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hierfl.core.importance_sampling import K_HAT, Weights
from hierfl.core.importance_sampling import smoothed as pareto_smoothed
from hierfl.core.trees import Tree
from hierfl.method import Reports
from hierfl.summaries.wide_draws import highest

ROUNDING = 1e-9  # log weights that differ by no more are equal
# How far above the mean, in nats, the largest weight must be to speak of a tail. Logs of ratios
# grow like a polynomial of the distance, and the surrogate falls faster: where no weight is twice
# the mean, what lies beyond adds nothing. Its shape misleads there: of 200 sets of binomial rows
# k-hat was above 0.7 in 30, with 99.8 % of the draws effective.
TAIL = math.log(2.0)
LEAST_ASKED, TIMES = 100, 6  # draws for a quadratic, and as many as its coefficients times
PASSES = 4  # of the fit of a quadratic


def unweighted(count: int, size: int) -> Tree:
    """Return zeros for S draws of size K, their log density and equal log weights."""
    return {
        "draws": torch.zeros(count, size),
        "log_p": torch.zeros(count),
        "log_weights": torch.full((count,), -math.log(count)),
    }


def smoothed(log_ratios: Tensor) -> Weights:
    """Pareto-smooth log weights; weights that differ by rounding alone are made equal.

    Where no weight is far above the mean there is no tail: k-hat is 0.
    """
    span, size = float(log_ratios.max() - log_ratios.min()), float(log_ratios.abs().max())
    if math.isfinite(size) and span <= ROUNDING * max(1.0, size):
        count = len(log_ratios)
        return Weights(torch.full_like(log_ratios, -math.log(count)), 0.0, float(count))
    found = pareto_smoothed(log_ratios)
    flat = float(highest(log_ratios)) < TAIL
    return found._replace(k_hat=0.0) if found.k_hat >= K_HAT and flat else found


def moments(draws: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and sds of weighted draws (S, K), (K,) each."""
    share = log_weights.exp()
    mean = share @ draws
    return mean, (share @ (draws - mean).square()).sqrt()


def sds(draws: Tensor) -> Tensor:
    """Return the sds of draws (S, K), each above 0; `Tensor.std` would warn if K is 0."""
    return draws.std(0) + 1e-9 if draws.shape[1] else draws.new_zeros(0)


def apart(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the largest shift of a mean, in sds, and the largest relative change of an sd."""
    (mean, sd), (new_mean, new_sd) = one, other
    ratio = (new_sd / sd).log().abs().max().expm1()
    return ((new_mean - mean).abs() / new_sd).max(), ratio


def with_error(state: Tree, reports: Reports, variance: Tree | None) -> Tree:
    """Return the state with the sd of the log weights' error; clients' errors are independent."""
    if variance is None:
        return state
    new = int((~state["weighted"][reports.ids]).sum())
    total = state["inner_error"].nan_to_num().square() + new * torch.as_tensor(variance).double()
    return {**state, "inner_error": total.sqrt()}


# ------------------------------------------------------------------------------ of many clients
def k_hats_of(log_ratios: Tensor) -> Tensor:
    """Return k-hat of each client's weights (N,), of log ratios (S, N); 0 where there is no tail."""
    found = torch.zeros(log_ratios.shape[1])
    for k in (highest(log_ratios) > TAIL).nonzero()[:, 0].tolist():
        found[k] = smoothed(log_ratios[:, k]).k_hat
    return found


def asked_of(size: int, most: int) -> int:
    """Return how many draws of z (K = `size`) a quadratic needs to be fitted and tested."""
    return min(most, max(LEAST_ASKED, TIMES * (size + 1) * (size + 2) // 2))


def everywhere(
    log_ratios: Tensor, at: Tensor, draws: Tensor, log_base: Tensor
) -> tuple[Tensor, float]:
    """Return the log ratio of all clients together at all draws, from some of them.

    The posterior of many clients is narrow, and their log ratio is smooth: a quadratic of z fits
    where the posterior is, which is where its squares are weighted.

    Args:
        log_ratios: (A,) summed over clients.
        at: (A,) int64, of the draws.
        draws: (S, K).
        log_base: (S,) to which log ratios are added for log weights.

    Returns:
        (S,), and the sd of the quadratic's error under the posterior; 0 where all draws were asked.
    """
    if len(at) == len(draws):
        return log_ratios, 0.0
    x = (draws - draws.mean(0)) / (draws.std(0) + 1e-300)
    i, j = torch.triu_indices(x.shape[1], x.shape[1])
    powers = torch.cat([torch.ones(len(x), 1), x, x[:, i] * x[:, j]], 1)
    known, share = powers[at], torch.full((len(at),), 1.0 / len(at))
    for _ in range(PASSES):
        root = share.sqrt()[:, None]
        fitted = torch.linalg.lstsq(root * known, root * log_ratios[:, None]).solution[:, 0]
        share = (known @ fitted + log_base[at]).softmax(0)
    left = log_ratios - known @ fitted
    degrees = max(1e-3, 1.0 - known.shape[1] * float(share.square().sum()))
    return powers @ fitted, float(((share * left.square()).sum() / degrees).sqrt())
