"""Sites that are Normal on the unconstrained scale: their means and precisions."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import ExpTransform, TransformedDistribution

from hierfl.program.check_data import kind_of
from hierfl.program.sites import LatentSite
from hierfl.program.traces import Site

WRAPPERS = (torch.distributions.Independent, dist.ExpandedDistribution)


class NotNormal(Exception):
    """A site whose distribution is not Normal on the unconstrained scale."""


def means_of(sites: tuple[LatentSite, ...], found: dict[str, Site]) -> Tensor:
    """Return the means of sites, unconstrained: (C, D) of local sites, (1, K) of global ones."""
    return torch.cat(
        [_flat(site, normal_of(found[site.name]["fn"]).loc / _unit(site)) for site in sites], -1
    )


def precision_of(sites: tuple[LatentSite, ...], found: dict[str, Site]) -> tuple[Tensor, Tensor]:
    """Return the precision of sites, given those that their means depend on, and its log det.

    They are (C, D, D) and (C,) of local sites, (1, K, K) and (1,) of global ones.
    """
    sizes = [site.size for site in sites]
    before = [sum(sizes[:i]) for i in range(len(sizes))]
    total, log_det = torch.zeros(()), torch.zeros(())
    for site, start in zip(sites, before, strict=True):
        fn = normal_of(found[site.name]["fn"])
        if isinstance(fn, torch.distributions.MultivariateNormal):
            unit = _unit(site)
            across = unit[..., :, None] * unit[..., None, :] if unit.dim() else 1.0
            dense = _block_diagonal(_blocks(site, fn.precision_matrix * across))
            tril = _blocks(site, fn.scale_tril / (unit[..., None] if unit.dim() else 1.0))
            log_det = log_det - 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1))
        else:
            scale = _flat(site, fn.scale / _unit(site))
            dense = torch.diag_embed(scale**-2.0)
            log_det = log_det - 2.0 * scale.log().sum(-1)
        after = sum(sizes) - start - site.size
        total = total + torch.nn.functional.pad(dense, (start, after, start, after))
    return total, log_det


def normal_of(fn: Any) -> Any:
    """Return the Normal distribution of a site's unconstrained value, expanded to the site's shape.

    Raises:
        NotNormal: it has none.
    """
    shape = fn.batch_shape
    fn = unwrapped(fn)
    if isinstance(fn, TransformedDistribution) and [type(t) for t in fn.transforms] == [
        ExpTransform
    ]:
        fn = unwrapped(fn.base_dist)
    # the batch of what `to_event` has made an event stays
    if isinstance(fn, torch.distributions.MultivariateNormal | torch.distributions.Normal):
        whole: Any = fn
        return whole.expand((*shape, *fn.batch_shape[len(shape) :]))
    raise NotNormal(kind_of(fn))


def unwrapped(fn: Any) -> Any:
    """Return a distribution without what expands it or declares events of it."""
    while isinstance(fn, WRAPPERS):
        fn = fn.base_dist
    return fn


def _unit(site: LatentSite) -> Tensor:
    return torch.ones(()) if site.unit is None else site.unit


def _flat(site: LatentSite, value: Tensor) -> Tensor:
    """Return a parameter, one scalar per entry, as (C, size), or (1, size) of a global site."""
    clients_first = _clients_first(site, value)
    return clients_first.reshape(len(clients_first), -1)


def _blocks(site: LatentSite, value: Tensor) -> Tensor:
    """Return a parameter with one matrix per event: (C, blocks, d, d), or (1, blocks, d, d)."""
    clients_first = _clients_first(site, value)
    return clients_first.reshape(len(clients_first), -1, *value.shape[-2:])


def _clients_first(site: LatentSite, value: Tensor) -> Tensor:
    # a prior made outside the program, and passed to `models.regression`, has its own dtype
    value = value.to(torch.get_default_dtype())
    if not site.is_local:
        return value[None]
    inner = len(site.batch_shape) - 2
    return value.movedim((inner, inner + 1), (0, 1))[:, 0]


def _block_diagonal(blocks: Tensor) -> Tensor:
    """Return (C, blocks, d, d) as one matrix a client, (C, blocks d, blocks d)."""
    eye = torch.eye(blocks.shape[-3], dtype=blocks.dtype)
    apart = eye[:, None, :, None] * blocks[..., :, :, None, :]  # (C, b, d, b, d)
    return apart.flatten(-2).flatten(-3, -2)
