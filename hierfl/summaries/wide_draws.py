"""Draws of a wider surrogate, if weights of a client have a heavy tail, added to the first draws.

A likelihood may fall slower than its Gaussian factor on one side: that of a client without a single
event is flat there. Draws of the surrogate then miss a tail of the posterior, and weights, which
are of these draws, hardly show it. (For such a client alone in its region, means were off by 0.15
posterior sds at a k-hat of 0.51.) Draws are therefore made once more, of a surrogate in which the
factors of these clients are raised to a small power. Both sets count:

    w_i = p(x_i) / ( q1(x_i) / Z1 + q2(x_i) / Z2 )

Sources: the balance heuristic, Veach and Guibas 1995, doi:10.1145/218380.218498; Z2 / Z1 by reverse
logistic regression, Geyer 1994, which is the bridge sampling of Meng and Wong 1996, Statistica
Sinica 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from scipy.optimize import brentq
from torch import Tensor

from hierfl.summaries.hierarchy import Factors

# a client's weights are heavy if their k-hat and the largest of them over their mean, in nats, are
# above
HEAVY, FAR = 0.3, 1.5
POWERS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
LEAST = 0.1  # share of the wider surrogate's draws that must be effective on their own
FARTHEST = 1e3  # nats between Z1 and Z2


def is_heavy(k_hats: Tensor, log_ratios: Tensor) -> Tensor:
    """Return which clients' weights are heavy, (N,), by k-hats (N,) and log ratios (S, N)."""
    return (k_hats > HEAVY) & (highest(log_ratios) > FAR)


def highest(log_ratios: Tensor) -> Tensor:
    """Return by how much the largest weights of (S, ...) exceed their means, in nats."""
    return log_ratios.max(0).values - log_ratios.logsumexp(0) + math.log(len(log_ratios))


def raised(factors: Factors, powers: Tensor) -> Factors:
    """Return factors raised to powers (N,)."""
    precision = factors.precision * powers[:, None, None]
    return factors._replace(precision=precision, shift=factors.shift * powers[:, None])


def powers_of(
    heavy: Tensor, log_weights: Tensor, log_p: Tensor, wider: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the least power of heavy factors that leaves enough draws effective, (N,).

    With r = p / q2, a share 1 / (E_p[r] E_p[1 / r]) of draws is effective. Others' powers are 1.

    Args:
        heavy: (N,) bool.
        log_weights: (S,) of draws of the surrogate, normalized.
        log_p: (S,) their log densities under the surrogate.
        wider: powers (N,) -> the same under the surrogate of raised factors.
    """
    powers = torch.ones(len(heavy))
    for power in POWERS:
        powers = torch.where(heavy, power, 1.0)
        log_r = log_weights + log_p - wider(powers)
        share = -(log_weights + log_r).logsumexp(0) - (log_weights - log_r).logsumexp(0)
        if float(share) >= math.log(LEAST):
            break
    return powers


def combined(first: Tensor, second: Tensor, log_target: Tensor) -> Tensor:
    """Return the log weights of two sets of equally many draws taken together, (2 S,).

    `first` (2 S,) is the log density, up to a constant, of the surrogate that the first S draws are
    from, `second` (2 S,) that of the others', and `log_target` (2 S,) that of the posterior.
    """
    half, apart = len(first) // 2, second - first

    def excess(constant: float) -> float:
        from_second = (apart - constant).sigmoid()
        return float(from_second[:half].sum() - (1.0 - from_second[half:]).sum())

    middle = float(apart.median())
    constant = brentq(excess, middle - FARTHEST, middle + FARTHEST)
    return log_target - torch.logaddexp(first, second - constant)
