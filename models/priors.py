"""Priors as sites: global ones of a number or a tensor, and local ones given those."""

from collections.abc import Callable
from typing import Any, TypeGuard

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import Distribution

Prior = TorchDistributionMixin | Tensor | float
"""A distribution of one element (the same for each) or of the whole tensor; or a known value."""


def given(
    name: str, prior: Prior, shape: tuple[int, ...] = (), *, start: Tensor | None = None
) -> Tensor:
    """Return a tensor that has a prior: the value of a global site, or a known value.

    A distribution, of all its dimensions together () or `shape`, makes a global site; a number or a
    tensor makes none. Guides start at `start`, by default at the prior's mean.
    """
    if not is_distribution(prior):
        value = torch.as_tensor(prior, dtype=torch.get_default_dtype())
        _check_shape(name, value.shape, shape)
        return value.expand(shape)
    _check_shape(name, prior.shape(), shape)
    expanded = prior if prior.shape() == torch.Size(shape) else prior.expand(shape)
    return pyro.sample(
        name, expanded.to_event(len(expanded.batch_shape)), infer=_start_option(start)
    )


def _check_shape(name: str, shape: torch.Size, full_shape: tuple[int, ...]) -> None:
    if shape not in (torch.Size(), torch.Size(full_shape)):
        raise ValueError(
            f"the prior of '{name}' has shape {tuple(shape)}: "
            f"it must be the prior of one number, or have shape {full_shape}"
        )


def varying(
    name: str, loc: Tensor, scale: Tensor, *, centered: bool, start: Tensor | None = None
) -> Tensor:
    """Return a local tensor, (C, 1, *event), where *event is the shape of `loc`.

    Call it inside the clients plate.

        centered:      w_k ~ Normal(loc, scale^2)
        non-centered:  w_k = loc + scale * z_k,    z_k ~ Normal(0, 1)

    Centered, `name` is a local site. Non-centered, `name_offset` (z_k) is the local site, and
    `name` is deterministic.

    Both are the same density of (loc, scale, w) in different coordinates. The posterior of z_k
    hardly depends on the scale where clients have few rows, and that of w_k hardly does where they
    have many. Choose accordingly if the guide cannot represent this dependence; only
    `guides.conditional` can.

    Args:
        name: name of w_k.
        loc: mean, (*event).
        scale: standard deviation > 0, () or (*event).
        centered: which of the two.
        start: initial value of w_k for guides, in the shape of `loc`. Default None: the prior's
            mean.
    """
    event = loc.dim()
    if centered:
        return pyro.sample(
            name, dist.Normal(loc, scale).to_event(event), infer=_start_option(start)
        )
    start = None if start is None else (start - loc) / scale
    offset = pyro.sample(
        f"{name}_offset",
        dist.Normal(torch.zeros_like(loc), 1.0).to_event(event),
        infer=_start_option(start),
    )
    value = pyro.deterministic(name, loc + scale * offset, event_dim=event)
    return value


def _start_option(start: Tensor | None) -> Any:
    return {} if start is None else {"start": start}


def check_scale(argument: str, prior: Prior) -> Prior:
    """Return the prior of a scale, refusing a value that is not > 0 and a prior that allows one."""
    if is_distribution(prior):
        positive = not bool(prior.support.check(-torch.ones(prior.shape())).any())
    else:
        positive = bool((torch.as_tensor(prior) > 0.0).all())
    if not positive:
        raise ValueError(
            f"{argument} is {prior}, but a scale must be > 0: "
            f"use a HalfNormal, a HalfCauchy, a LogNormal or a number > 0"
        )
    return prior


def is_distribution(prior: Prior) -> TypeGuard[TorchDistributionMixin]:
    """Return whether a prior is a distribution of Pyro, not a known value; refuse one of torch."""
    if isinstance(prior, Distribution) and not isinstance(prior, TorchDistributionMixin):
        raise TypeError(
            f"{type(prior).__name__} is a torch distribution, not Pyro's: "
            f"use pyro.distributions.{type(prior).__name__}"
        )
    return isinstance(prior, Distribution)


def either(prior: Prior | None, default: Callable[[], Prior]) -> Prior:
    """Return the prior, or else the default, made in torch's current default dtype."""
    return default() if prior is None else prior
