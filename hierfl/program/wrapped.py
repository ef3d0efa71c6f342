"""Programs under a handler: labels as floats, masked values filled, a site that all programs have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from hierfl.data.batch import ClientBatch
from hierfl.program.sites import COMMON, Model
from hierfl.program.traces import NAN_MASKED, Site, counts_of, is_likelihood, samples


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
