"""Moments of each row's distribution over draws; labels count as in the fit, masked or scaled."""

import math
from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.data.clients import ClientData
from hierfl.program.supports import kind_of as kind_of_distribution


def known_of(rows: ClientData) -> Tensor | None:
    """Return which rows have a label of their own, (n,); None: all."""
    return None if rows.frame_rows is None else rows.frame_rows.labeled


def without_unknown(rows: ClientData, label: Tensor) -> Tensor:
    """Return the labels of rows (n, ...), NaN where a row has none of its own."""
    is_known = known_of(rows)
    return label if is_known is None or bool(is_known.all()) else with_nan(label, ~is_known)


def with_nan(label: Tensor, none: Tensor) -> Tensor:
    """Return labels (n, ...) in floating point, NaN where `none` (n,)."""
    whole = label.to(torch.promote_types(label.dtype, torch.float32))
    return whole.masked_fill(none.view(-1, *[1] * (label.dim() - 1)), torch.nan)


def kind_of(fn: Any) -> str:
    """Return "binary", "categorical", "numeric", "angle", or "other" for vectors."""
    if fn.event_shape:
        return "other"
    base = getattr(fn, "base_dist", fn)
    if isinstance(base, dist.Bernoulli):
        return "binary"
    if isinstance(base, dist.VonMises):
        return "angle"
    return "categorical" if isinstance(base, dist.Categorical) else "numeric"


def moments(site: str, fn: Any, label: Tensor | None, counts: Tensor | None = None) -> Tree:
    """Return what is averaged over draws: moments or class probabilities, entropy, log density."""
    base = getattr(fn, "base_dist", fn)
    probabilities = isinstance(base, dist.Categorical)
    mean, variance = (fn.probs, None) if probabilities else mean_and_variance(site, fn)
    out = {"mean": mean}
    if kind_of(fn) in ("binary", "categorical"):
        terms = torch.special.entr(mean)
        out["noise"] = terms.sum(-1) if probabilities else terms + torch.special.entr(1.0 - mean)
    if variance is not None:
        out["square"] = variance + mean**2
    if label is not None:
        out["log_prob"], out["label"] = fn.log_prob(label), label
        if counts is not None:
            out["log_prob"] = torch.where(counts == 0.0, 0.0, out["log_prob"] * counts)
            out["counts"] = counts.expand(out["log_prob"].shape)
    return out


def mean_and_variance(site: str, fn: Any) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of a site's distribution, where they have a closed form."""
    base = getattr(fn, "base_dist", fn)
    if isinstance(base, dist.StudentT):  # torch sets entries by a mask, which vmap does not allow
        df = base.df.expand(fn.shape())
        spread = base.scale.expand(fn.shape()) ** 2 * df / (df - 2.0)
        mean = torch.where(df > 1.0, base.loc.expand(fn.shape()), torch.nan)
        return mean, torch.where(df > 2.0, spread, torch.where(df > 1.0, torch.inf, torch.nan))
    try:
        return fn.mean, fn.variance
    except (NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"site '{site}' ({kind_of_distribution(fn)}) has no mean and variance in closed form, "
            "which a prediction averages: draw its labels instead, fit.posterior_predictive()"
        ) from error


def averaged(name: str, value: Tensor) -> Tensor:
    """Average over draws, (C, S, 1, B, ...) -> (C, B, ...); log densities by logsumexp."""
    value = value.squeeze(2)
    if name in ("label", "counts"):
        return value[:, 0]
    return value.logsumexp(1) - math.log(value.shape[1]) if name == "log_prob" else value.mean(1)


def joined(
    total: Mapping[str, Tensor], more: dict[str, Tensor], before: int, count: int
) -> dict[str, Tensor]:
    """Join averages over `before` draws and averages over `count` further ones."""
    if not before:
        return more
    share = count / (before + count)
    joined = {
        name: torch.lerp(value, more[name], share)
        for name, value in total.items()
        if value.is_floating_point()
    }
    joined |= {name: more[name] for name in ("label", "counts") if name in more}
    if "log_prob" in more:
        joined["log_prob"] = torch.logaddexp(
            total["log_prob"] + math.log1p(-share), more["log_prob"] + math.log(share)
        )
    return joined
