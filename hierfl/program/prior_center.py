"""The center of a prior, computed without a draw: the starting point of guides and of inner searches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import biject_to

from hierfl.program.traces import Site


def has_mean(fn: Any) -> bool:
    """Return whether a distribution has a finite mean inside its support."""
    try:
        return bool(fn.mean.isfinite().all()) and bool(fn.support.check(fn.mean).all())
    except (NotImplementedError, AttributeError):
        return False


def center(fn: Any, by_mean: bool) -> Tensor:
    """Return the center of a distribution, of shape `fn.shape()`.

    Args:
        fn: the distribution.
        by_mean: take the mean; else the image of 0 under the map from R^k to the support.
    """
    if by_mean:
        mean: Tensor = fn.mean
        return mean.expand(fn.shape())
    transform = biject_to(fn.support)
    value: Tensor = transform(torch.zeros(transform.inverse_shape(fn.shape())))
    return value


class Center(Messenger):
    """Sets every latent site to its prior's center given the sites before it, or to `start` in its `infer`.

    Args:
        by_mean: site -> whether to take the mean as center. Of a site that is not in it the mean is taken if
            it lies inside the support; that check reads values, which a compiled graph cannot do.
    """

    def __init__(self, by_mean: Mapping[str, bool] | None = None) -> None:
        super().__init__()
        self.by_mean = by_mean or {}

    def _pyro_sample(self, msg: Site) -> None:
        if msg["done"] or msg["is_observed"] or isinstance(msg["fn"], _Subsample):
            return
        start = msg["infer"].get("start")
        if start is not None:  # a program may set where a site starts, such as a network's weights
            msg["value"], msg["done"] = torch.as_tensor(start).expand(msg["fn"].shape()), True
            return
        by_mean = self.by_mean[msg["name"]] if msg["name"] in self.by_mean else has_mean(msg["fn"])
        msg["value"], msg["done"] = center(msg["fn"], by_mean), True


class Middle(Messenger):
    """Sets every latent site to the middle of its distribution: its mean, or the image of its base's."""

    def _pyro_sample(self, msg: Site) -> None:
        if not (msg["done"] or msg["is_observed"] or isinstance(msg["fn"], _Subsample)):
            msg["value"], msg["done"] = middle(msg["fn"]), True


def middle(fn: Any) -> Tensor:
    """Return the mean of a distribution, or the image of its base's where it is transformed, of shape `fn.shape()`.

    Raises:
        NotImplementedError: neither is known.
    """
    if isinstance(fn, torch.distributions.Independent):
        return middle(fn.base_dist)
    if isinstance(fn, torch.distributions.TransformedDistribution):
        value = middle(fn.base_dist)
        for transform in fn.transforms:
            value = transform(value)
        return value
    mean: Tensor = fn.mean
    return mean.expand(fn.shape())
