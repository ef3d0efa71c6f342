"""Integer and boolean labels, observed as floats where their site cannot score them otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.program.sites import Model
from hierfl.program.traces import Site, is_likelihood, samples


class _Floats(Messenger):
    """Turns the observed values of some sites into floats of the batch's dtype."""

    def __init__(self, sites: frozenset[str], dtype: torch.dtype) -> None:
        super().__init__()
        self.sites, self.dtype = sites, dtype

    def _pyro_sample(self, msg: Site) -> None:
        if msg["name"] in self.sites and msg["is_observed"]:
            value = torch.as_tensor(msg["value"])
            msg["value"] = value if value.is_floating_point() else value.to(self.dtype)


def sites_to_float(trace: Any) -> frozenset[str]:
    """Return the observed sites that score integers or booleans only as floats, such as a Bernoulli's.

    A Bernoulli with floating labels is one of them: rows to predict may have integers.
    """
    return frozenset(
        name for name, site in samples(trace) if is_likelihood(site) and _is_picky(site)
    )


def _is_picky(site: Site) -> bool:
    value = site["value"]
    if not isinstance(value, Tensor):
        return False
    if value.is_floating_point():
        if not isinstance(getattr(site["fn"], "base_dist", site["fn"]), dist.Bernoulli):
            return False
        return not _scores(site, value.long())
    return not _scores(site, value) and _scores(site, value.to(torch.get_default_dtype()))


def _scores(site: Site, value: Tensor) -> bool:
    try:
        site["fn"].log_prob(value)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return False
    return True


def with_float_labels(model: Model, sites: Iterable[str]) -> Model:
    """Return the model with the labels of some sites observed as floats."""
    chosen = frozenset(sites)

    @wraps(model, updated=())
    def floated(batch: ClientBatch) -> Any:
        with _Floats(chosen, batch.counts.dtype):
            return model(batch)

    return floated
