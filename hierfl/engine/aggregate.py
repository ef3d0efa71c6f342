"""Weighted sums of the clients' updates, formed by the engine, and the updates that are odd."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hierfl.core.trees import Tree, add, lerp, named_leaves, scaled, tree_leaves, tree_map
from hierfl.core.user_warnings import warn
from hierfl.method import Each, LogShare, Reports, Share, Surprise, Up


class LogSum(NamedTuple):
    """The sum of `LogShare`s: their weighted mean, and logs () of the sums of w and of w^2."""

    value: Tree
    log_weight: Tensor
    log_square: Tensor


Sums = dict[str, Share | LogSum | Reports]


def summed(shares: Share | LogShare) -> Share | LogSum:
    """Sum the shares of C clients, C in front; a `Share`'s value is times its weight already."""
    if isinstance(shares, Share):
        total = tree_map(partial(torch.sum, dim=0), shares.value)
        return Share(total, torch.as_tensor(shares.weight).sum(0))
    log_weight = torch.as_tensor(shares.log_weight)
    parts = log_weight.softmax(0)
    mean = tree_map(lambda v: torch.tensordot(parts, v, 1), shares.value)
    return LogSum(mean, log_weight.logsumexp(0), (2.0 * log_weight).logsumexp(0))


def added(
    share: Share | LogSum | Reports, other: Share | LogSum | Reports
) -> Share | LogSum | Reports:
    """Return the sum of two sums of shares of the same kind, or the reports of both groups."""
    if isinstance(share, Reports) and isinstance(other, Reports):
        joined = tree_map(lambda a, b: torch.cat([a, b]), share.value, other.value)
        return Reports(joined, torch.cat([share.ids, other.ids]))
    if isinstance(share, LogSum) and isinstance(other, LogSum):
        joined = torch.logaddexp(share.log_weight, other.log_weight)
        square = torch.logaddexp(share.log_square, other.log_square)
        mean = lerp(share.value, other.value, (other.log_weight - joined).exp())
        return LogSum(mean, joined, square)
    if isinstance(share, Share) and isinstance(other, Share):
        return Share(add(share.value, other.value), share.weight + other.weight)
    raise TypeError(
        "a Share, a LogShare and an Each cannot be summed: a client must send the same kinds in "
        "every round"
    )


def means_of(total: Mapping[str, Share | LogSum | Reports]) -> dict[str, Tree]:
    """Return the weighted means by name, and of `LogShare`s `effective_<name>`, (sum w)^2 / sum w^2."""
    means: dict[str, Tree] = {}
    for name, share in total.items():
        if isinstance(share, Reports):
            means[name] = share
        elif isinstance(share, LogSum):
            means[f"effective_{name}"] = (2.0 * share.log_weight - share.log_square).exp()
            means[name] = share.value
        else:
            means[name] = scaled(share.value, 1.0 / share.weight)
    return means


FEWEST = 8  # clients: with fewer, the spread of their norms is not known
FAR = 5.0  # modified z-score; Iglewicz and Hoaglin propose 3.5 for one sample, not for thousands
TIMES = 10.0  # the median: smaller norms are not named, however little others differ
TO_SD = NormalDist().inv_cdf(0.75)  # median absolute deviation of a standard normal, 0.6745
FEWEST_COMPARED = 4  # clients that are judged: with fewer, nobody can say which is the odd one
ALARM = 0.01  # tail probability, times the number of clients that are judged (Bonferroni)
COMPARED, CONFLICTS = "compared", "conflicts"  # columns of the history


def not_finite(ups: Up, own: Tree, before: Tree) -> dict[int, str]:
    """Return, by place, why a client must not be counted: its update or state is not finite."""
    faults: dict[int, str] = {}

    def note(bad: Tensor, why: str) -> None:
        places = bad.reshape(len(bad), -1).any(1).nonzero()[:, 0].tolist()
        faults.update({k: why for k in places if k not in faults})

    for path, leaf in named_leaves(ups).items():
        if not bool(leaf.sum().isfinite()):
            note(~leaf.isfinite(), f"its update is not finite ({path})")
    for (path, leaf), old in zip(named_leaves(own).items(), tree_leaves(before), strict=True):
        if leaf.is_floating_point() and bool(leaf.sum().isnan()):
            note(leaf.isnan() & ~old.isnan(), f"its state is NaN after the round ({path})")
    return faults


def update_norms(share: Share | LogShare | Each) -> Tensor:
    """Return the norm of what each client sends under one name, (C,); scalars are left out."""
    norms = []
    for leaf in tree_leaves(share.value):
        if leaf.dim() > 1 and leaf[0].numel() > 1 and leaf.is_floating_point():
            norms.append(torch.linalg.vector_norm(leaf.flatten(1), dim=1))
    if not norms:
        return torch.zeros(0)
    norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm(dim=0)
    if not isinstance(share, Share):
        return norm
    weight = torch.as_tensor(share.weight).abs()
    return torch.where(weight > 0, norm / weight.clamp(min=torch.finfo(norm.dtype).tiny), 0.0)


def far_out(norms: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return place, share and norm in medians of updates far larger than the cohort's others.

        z_k = 0.6745 (log r_k - median(log r)) / median|log r - median(log r)|,  r_k a norm

    Far out is z_k > 5 and r_k above ten medians: 1 to 2 of 100 honest rounds of 8 to 20 clients.
    Source: modified z-scores, Iglewicz and Hoaglin 1993. `norms` are (C,) by share, or (0,).
    """
    faults = []
    for name, norm in norms.items():
        if len(norm) < FEWEST:
            continue
        size = norm.double().clamp(min=torch.finfo(torch.float64).tiny).log()
        above = size - size.quantile(0.5)
        z = TO_SD * above / above.abs().quantile(0.5)
        for k in ((z > FAR) & (above.exp() > TIMES)).nonzero()[:, 0].tolist():
            faults.append({"place": k, "share": name, "times": float(above[k].exp())})
    return faults


def said_of_conflicts(found: Surprise, names: Sequence[str], counts: Tensor) -> dict[str, Any]:
    """Warn of clients in conflict with the others, of `counts` (N,) rows: a false alarm in at most 1 of 100 fits."""
    judged = (~found.p.isnan() & (counts >= found.least_rows)).nonzero()[:, 0].tolist()
    if len(judged) < FEWEST_COMPARED:
        return {COMPARED: 0}
    values = found.p.double().tolist()
    judged.sort(key=values.__getitem__)
    surprise, conflicts = min(1.0, len(judged) * values[judged[0]]), []
    for k in judged:
        p, away = min(1.0, len(judged) * values[k]), float(found.away[k])
        if p >= ALARM:
            break
        conflicts.append({"client": names[k], "p": p, "away": away})
        warn(
            f"client '{names[k]}' conflicts with all others: its summary is {away:.1f} times as "
            f"far from what they predict as summaries lie (p = {p:.1g}, corrected for "
            f"{len(judged)} clients). It is counted. Check that its outcome and columns have "
            "the others' coding and units; to see what it changes, fit without it (data.select)",
        )
    return {COMPARED: len(judged), "surprise": surprise, CONFLICTS: conflicts}
