"""Weighted sums of the clients' updates, formed by the engine; the server sees only their means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.trees import Tree, add, lerp, scaled, tree_map
from hierfl.method import LogShare, Share


class LogSum(NamedTuple):
    """The sum of `LogShare`s.

    value: their weighted mean.
    log_weight: () log of the sum of their weights.
    log_square: () log of the sum of their squared weights.
    """

    value: Tree
    log_weight: Tensor
    log_square: Tensor


def summed(shares: Share | LogShare) -> Share | LogSum:
    """Sum shares over clients.

    Args:
        shares: one share of C clients, C in front of every tensor; a `Share`'s value is multiplied by its
            weight already.
    """
    if isinstance(shares, Share):
        return Share(
            tree_map(lambda v: v.sum(0), shares.value), torch.as_tensor(shares.weight).sum(0)
        )
    log_weight = torch.as_tensor(shares.log_weight)
    parts = log_weight.softmax(0)
    mean = tree_map(lambda v: torch.tensordot(parts, v, 1), shares.value)
    return LogSum(mean, log_weight.logsumexp(0), (2.0 * log_weight).logsumexp(0))


def added(one: Share | LogSum, other: Share | LogSum) -> Share | LogSum:
    """Return the sum of two sums of shares.

    Raises:
        TypeError: one is a sum of `Share`s, the other of `LogShare`s.
    """
    if isinstance(one, LogSum) and isinstance(other, LogSum):
        both = torch.logaddexp(one.log_weight, other.log_weight)
        square = torch.logaddexp(one.log_square, other.log_square)
        return LogSum(lerp(one.value, other.value, (other.log_weight - both).exp()), both, square)
    if isinstance(one, Share) and isinstance(other, Share):
        return Share(add(one.value, other.value), one.weight + other.weight)
    raise TypeError(
        "a Share and a LogShare cannot be summed: a client must send the same kinds in every round"
    )


def means_of(total: Mapping[str, Share | LogSum]) -> dict[str, Tree]:
    """Return the weighted mean of each sum of shares, by name.

    For a sum of `LogShare`s there is also `effective_<name>`, (): the effective number of clients,
    (sum of weights)^2 / sum of squared weights.
    """
    means: dict[str, Tree] = {}
    for name, share in total.items():
        if isinstance(share, LogSum):
            means[f"effective_{name}"] = (2.0 * share.log_weight - share.log_square).exp()
        means[name] = (
            share.value if isinstance(share, LogSum) else scaled(share.value, 1.0 / share.weight)
        )
    return means
