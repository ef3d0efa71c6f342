"""Programs under a handler: labels as floats, masked values filled, a site that all programs have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import AffineTransform, ExpTransform, biject_to

from hierfl.data.batch import ClientBatch
from hierfl.program.sites import COMMON, Model
from hierfl.program.traces import NAN_MASKED, Site, counts_of, is_latent, is_likelihood, samples


class _Floats(Messenger):
    """Turns the observed values of some sites into floats of the batch's dtype."""

    def __init__(self, sites: frozenset[str], dtype: torch.dtype) -> None:
        super().__init__()
        self.sites, self.dtype = sites, dtype

    def _pyro_sample(self, msg: Site) -> None:
        if msg["name"] in self.sites and msg["is_observed"]:
            value = torch.as_tensor(msg["value"])
            msg["value"] = value if value.is_floating_point() else value.to(self.dtype)


class _Filled(Messenger):
    """Fills observed values that no mask counts, which may be NaN, by a value inside their support."""

    def _pyro_sample(self, msg: Site) -> None:
        value = msg["value"]
        if not (msg["is_observed"] and isinstance(value, Tensor) and value.is_floating_point()):
            return
        fn, counts = counts_of(msg)
        if counts is not None and not isinstance(fn, NAN_MASKED):
            is_counted = (counts > 0.0)[(..., *[None] * fn.event_dim)]
            msg["value"] = torch.where(is_counted | value.isfinite(), value, _inside(fn, value))


def _inside(fn: Any, like: Tensor) -> Tensor:
    """Return a value inside the support of a distribution."""
    if getattr(fn.support, "is_discrete", False):
        return torch.zeros_like(like)
    transform = biject_to(fn.support)
    value: Tensor = transform(torch.zeros(transform.inverse_shape(like.shape), dtype=like.dtype))
    return value


class _Plain(Messenger):
    """Gives latent sites that are moved and scaled Normals the Normal or log-normal that they are."""

    def _pyro_sample(self, msg: Site) -> None:
        if is_latent(msg) and (plain := plain_of(msg["fn"])) is not None:
            msg["fn"] = plain


def plain_of(fn: Any) -> Any:
    """Return a Normal or log-normal that is a moved and scaled Normal, perhaps exponentiated; or None."""
    if isinstance(fn, torch.distributions.Independent):
        inner = plain_of(fn.base_dist)
        return None if inner is None else inner.to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.ExpandedDistribution):
        inner = plain_of(fn.base_dist)
        return None if inner is None else inner.expand(fn.batch_shape)
    if type(fn) is not dist.TransformedDistribution:
        return None
    base, events = fn.base_dist, len(fn.event_shape)
    while isinstance(base, torch.distributions.Independent | dist.ExpandedDistribution):
        base = base.base_dist
    *moves, last = fn.transforms or [None]
    is_log = isinstance(last, ExpTransform)
    moves = moves if is_log else [*moves, last]
    if not (isinstance(base, torch.distributions.Normal) and all(map(_is_affine, moves))):
        return None
    loc, scale = base.loc, base.scale
    for move in moves:
        loc, scale = move.loc + move.scale * loc, torch.as_tensor(move.scale).abs() * scale
    family: Any = dist.LogNormal if is_log else dist.Normal
    made = family(loc, scale).expand(fn.shape())
    return made.to_event(events) if events else made


def _is_affine(transform: Any) -> bool:
    return isinstance(transform, AffineTransform)


def has_mapped_normals(trace: Any) -> bool:
    """Return whether a latent site is a moved and scaled Normal, written as a transform."""
    return any(plain_of(site["fn"]) is not None for _, site in samples(trace) if is_latent(site))


def with_plain_sites(model: Model) -> Model:
    """Return the model with Normals in the place of latent sites that are maps of them."""
    return _under(model, lambda _: _Plain())


def sites_to_float(trace: Any) -> frozenset[str]:
    """Return the observed sites that need integers or booleans as floats, such as a Bernoulli's."""
    names = set()
    for name, site in samples(trace):
        value, fn = site["value"], site["fn"]
        if not is_likelihood(site) or not isinstance(value, Tensor):
            continue
        if value.is_floating_point():
            of_bernoulli = isinstance(getattr(fn, "base_dist", fn), dist.Bernoulli)
            picky = of_bernoulli and not _scores(site, value.long())
        else:
            as_float = value.to(torch.get_default_dtype())
            picky = not _scores(site, value) and _scores(site, as_float)
        if picky:
            names.add(name)
    return frozenset(names)


def _scores(site: Site, value: Tensor) -> bool:
    try:
        site["fn"].log_prob(value)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return False
    return True


def with_float_labels(model: Model, sites: Iterable[str]) -> Model:
    """Return the model with the labels of some sites observed as floats."""
    chosen = frozenset(sites)
    return _under(model, lambda batch: _Floats(chosen, batch.counts.dtype))


def with_filled_labels(model: Model) -> Model:
    """Return the model with numbers in the place of observed values that are NaN and masked."""
    return _under(model, lambda _: _Filled())


def _under(model: Model, handler_of: Callable[[ClientBatch], Messenger]) -> Model:
    """Return the model under a handler made for each batch."""

    @wraps(model, updated=())
    def handled(batch: ClientBatch) -> Any:
        with handler_of(batch):
            return model(batch)

    return handled


def with_common_site(model: Model) -> Model:
    """Return a program without global sites with one that nothing depends on."""

    @wraps(model, updated=())
    def joined(batch: ClientBatch) -> Any:
        pyro.sample(COMMON, dist.Normal(0.0, 1.0))
        return model(batch)

    return joined


def add_factor(name: str, total: Tensor, batch: ClientBatch, *, by_row: bool = True) -> None:
    """Add a term to a program's log density, (C, B) by row or (C, 1) by client."""
    with batch.clients(), batch.data() if by_row else nullcontext():
        pyro.factor(name, total)
