"""Weighted sums of the clients' updates, formed by the engine; the server sees only their means.

What a client sends as `Each` is not summed: the server sees it as the client sent it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.trees import Tree, add, lerp, scaled, tree_map
from hierfl.method import LogShare, Reports, Share


class LogSum(NamedTuple):
    """The sum of `LogShare`s: their weighted mean, and logs () of the sums of w and of w^2."""

    value: Tree
    log_weight: Tensor
    log_square: Tensor


Sums = dict[str, Share | LogSum | Reports]


def summed(shares: Share | LogShare) -> Share | LogSum:
    """Sum the shares of C clients, C in front; a `Share`'s value is times its weight already."""
    if isinstance(shares, Share):
        return Share(
            tree_map(lambda v: v.sum(0), shares.value), torch.as_tensor(shares.weight).sum(0)
        )
    log_weight = torch.as_tensor(shares.log_weight)
    parts = log_weight.softmax(0)
    mean = tree_map(lambda v: torch.tensordot(parts, v, 1), shares.value)
    return LogSum(mean, log_weight.logsumexp(0), (2.0 * log_weight).logsumexp(0))


def added(
    one: Share | LogSum | Reports, other: Share | LogSum | Reports
) -> Share | LogSum | Reports:
    """Return the sum of two sums of shares of the same kind, or the reports of both groups."""
    if isinstance(one, Reports) and isinstance(other, Reports):
        both = tree_map(lambda a, b: torch.cat([a, b]), one.value, other.value)
        return Reports(both, torch.cat([one.ids, other.ids]))
    if isinstance(one, LogSum) and isinstance(other, LogSum):
        both = torch.logaddexp(one.log_weight, other.log_weight)
        square = torch.logaddexp(one.log_square, other.log_square)
        return LogSum(lerp(one.value, other.value, (other.log_weight - both).exp()), both, square)
    if isinstance(one, Share) and isinstance(other, Share):
        return Share(add(one.value, other.value), one.weight + other.weight)
    raise TypeError(
        "a Share, a LogShare and an Each cannot be summed: a client must send the same kinds in "
        "every round"
    )


def means_of(total: Mapping[str, Share | LogSum | Reports]) -> dict[str, Tree]:
    """Return the weighted mean of each sum, by name; reports stay as they are.

    A sum of `LogShare`s has also `effective_<name>`, (): (sum of w)^2 / sum of w^2.
    """
    means: dict[str, Tree] = {}
    for name, share in total.items():
        if isinstance(share, Reports):
            means[name] = share
            continue
        if isinstance(share, LogSum):
            means[f"effective_{name}"] = (2.0 * share.log_weight - share.log_square).exp()
        means[name] = (
            share.value if isinstance(share, LogSum) else scaled(share.value, 1.0 / share.weight)
        )
    return means
