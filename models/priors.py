"""Priors of one number or one tensor as sites: global ones, and a client's own given those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import Distribution

Prior = TorchDistributionMixin | Tensor | float
"""A distribution (of one number, meant for each alike, or of the whole tensor); or a known value, which makes no site."""


def given(
    name: str, prior: Prior, shape: tuple[int, ...] = (), *, start: Tensor | None = None
) -> Tensor:
    """A tensor with a prior: a global site where the prior is a distribution, else the known value.

    Args:
        name: of the site.
        prior: of shape () or `shape`, batch and event dimensions alike.
        shape: of the value.
        start: where a guide should start, `shape`; None: at the prior's mean.

    Raises:
        ValueError: a prior of another shape.
    """
    if not is_distribution(prior):
        known = torch.as_tensor(prior, dtype=torch.get_default_dtype())
        _check_shape(name, known.shape, shape)
        return known.expand(shape)
    _check_shape(name, prior.shape(), shape)
    each = prior if prior.shape() == torch.Size(shape) else prior.expand(shape)
    value: Tensor = pyro.sample(name, each.to_event(len(each.batch_shape)), infer=_start(start))
    return value


def _check_shape(name: str, found: torch.Size, wanted: tuple[int, ...]) -> None:
    if found not in (torch.Size(), torch.Size(wanted)):
        raise ValueError(
            f"the prior of '{name}' has shape {tuple(found)}: it must be of one number, or of shape {wanted}"
        )


def varying(
    name: str, loc: Tensor, scale: Tensor, *, centred: bool, start: Tensor | None = None
) -> Tensor:
    """A client's own tensor, to be called inside the clients plate: (C, 1, *event) with `loc`'s shape as event.

        centred:      w_k ~ Normal(loc, scale^2),                               a site `name`
        non-centred:  w_k = loc + scale * z_k,  z_k ~ Normal(0, 1),             a site `name_offset`, and `name` recorded

    One density of (loc, scale, w) in two coordinates. The posterior of z_k hardly depends on scale where clients have few rows,
    that of w_k where they have many: choose accordingly if the guide cannot follow (all but `guides.conditional`).

    Args:
        name: of the site.
        loc: (*event,), the mean.
        scale: () or (*event,), > 0, the standard deviation.
        centred: which of the two.
        start: where a guide should start, `loc`'s shape; None: at the prior's mean.
    """
    event = loc.dim()
    if centred:
        value: Tensor = pyro.sample(
            name, dist.Normal(loc, scale).to_event(event), infer=_start(start)
        )
        return value
    start = None if start is None else (start - loc) / scale
    offset = pyro.sample(
        f"{name}_offset",
        dist.Normal(torch.zeros_like(loc), 1.0).to_event(event),
        infer=_start(start),
    )
    value = pyro.deterministic(name, loc + scale * offset, event_dim=event)
    return value


def _start(start: Tensor | None) -> Any:
    return {} if start is None else {"start": start}


def check_scale(argument: str, prior: Prior) -> Prior:
    """A prior of a scale, as it is.

    Raises:
        ValueError: one that allows negative values.
    """
    if is_distribution(prior):
        good = not bool(prior.support.check(-torch.ones(prior.shape())).any())
    else:
        good = bool((torch.as_tensor(prior) > 0.0).all())
    if not good:
        raise ValueError(
            f"{argument} is {prior}, not all > 0: give a HalfNormal, a HalfCauchy, a LogNormal or a number"
        )
    return prior


def is_distribution(prior: Prior) -> TypeGuard[TorchDistributionMixin]:
    """Whether a prior is a distribution, and no known value.

    Raises:
        TypeError: a distribution of torch that is not Pyro's.
    """
    if isinstance(prior, Distribution) and not isinstance(prior, TorchDistributionMixin):
        raise TypeError(
            f"{type(prior).__name__} is torch's own: take pyro.distributions.{type(prior).__name__}"
        )
    return isinstance(prior, Distribution)


def either(prior: Prior | None, default: Callable[[], Prior]) -> Prior:
    """The prior handed in, or the default, made now: in torch's default dtype of now."""
    return default() if prior is None else prior
