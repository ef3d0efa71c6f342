"""The sites of a Pyro trace: who owns them, and how their log densities are added up by owner."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from hierfl.data.batch import CLIENTS, ClientBatch

Site = Any  # a node of a Pyro trace, or the message of a handler: a dict


def in_clients(site: Site) -> bool:
    """Return whether a site is inside the clients plate, and so local."""
    return any(frame.name == CLIENTS for frame in site["cond_indep_stack"])


def is_latent(site: Site) -> bool:
    """Return whether a site is a latent variable; the index of a plate is not."""
    return (
        site["type"] == "sample"
        and not site["is_observed"]
        and not isinstance(site["fn"], _Subsample)
    )


def is_deterministic(site: Site) -> bool:
    """Return whether a site is a `pyro.deterministic`: a computed value that is recorded under a name."""
    return site["type"] == "sample" and bool(site["infer"].get("_deterministic"))


def is_factor(site: Site) -> bool:
    """Return whether a site is a `pyro.factor`."""
    return isinstance(getattr(site["fn"], "base_dist", site["fn"]), dist.Unit)


def is_likelihood(site: Site, factors: Container[str] = ()) -> bool:
    """Return whether a site is observed inside the clients plate.

    Args:
        site: of a trace.
        factors: each `pyro.factor` that counts as observed (`hierfl.program.factors`).
    """
    counts = not is_factor(site) or site["name"] in factors
    return site["is_observed"] and in_clients(site) and counts


def samples(trace: Any) -> Iterator[tuple[str, Site]]:
    """Yield name and site of every sample statement of a trace, observed or not, but not plates' indices."""
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and not isinstance(site["fn"], _Subsample):
            yield name, site


def scored(site: Site, term: Tensor) -> Tensor:
    """Return a site's term, scaled and masked as its plates say."""
    counted: Tensor = scale_and_mask(term, site["scale"], site["mask"])
    return counted


def per_client(term: Tensor) -> Tensor:
    """Sum a term (..., C, B) over all dimensions but that of the clients: (C,)."""
    return term.sum([d for d in range(term.dim()) if d != term.dim() - 2])


def sums_by_owner(
    terms: Iterable[tuple[Site, Tensor]], batch: ClientBatch
) -> tuple[Tensor, Tensor]:
    """Add up terms of sites, each scaled and masked as its plates say.

    Args:
        terms: sites and their terms, each of the batch shape of its site.
        batch: the clients the sites are of.

    Returns:
        The sums of local sites, a client each, (C,), and the sum of global sites, ().
    """
    device = batch.counts.device
    own, shared = torch.zeros(batch.num_clients, device=device), torch.zeros((), device=device)
    for site, term in terms:
        if in_clients(site):
            own = own + per_client(scored(site, term))
        else:
            shared = shared + scored(site, term).sum()
    return own, shared
