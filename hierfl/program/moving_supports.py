"""Latent sites whose supports depend on other sites or on the client, such as Uniform(0, top).

A map from the real line onto a support is made once. So a site of which it moves is sampled on the
real line, and mapped onto the support by the program itself; the site is then a deterministic one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyro
import pyro.distributions as dist
from pyro.infer.reparam.reparam import Reparam
from pyro.poutine.reparam_messenger import ReparamMessenger
from torch import Tensor, equal
from torch.distributions import biject_to

from hierfl.program.sites import Model, of_scalars
from hierfl.program.traces import Site, in_clients, is_latent, samples
from hierfl.program.wrapped import under


def has_bounds(trace: Any) -> bool:
    """Return whether the support of a latent site ends at a tensor, as a Uniform's."""
    return any(_bounds_of(site) for _, site in samples(trace) if is_latent(site))


def moving_supports(trace: Any, other: Any) -> frozenset[str]:
    """Return the latent sites whose supports differ from client to client, or between two traces."""
    return frozenset(
        name
        for name, site in samples(trace)
        if is_latent(site) and (_differ(site, other.nodes[name]) or _differ_by_client(site))
    )


def _bounds_of(site: Site) -> list[Tensor]:
    support = of_scalars(site["fn"].support)
    return [v for v in vars(support).values() if isinstance(v, Tensor)]


def _differ(site: Site, other: Site) -> bool:
    return not all(map(equal, _bounds_of(site), _bounds_of(other)))


def _differ_by_client(site: Site) -> bool:
    dim = 2 + site["fn"].event_dim
    bounds = [v for v in _bounds_of(site) if in_clients(site) and v.dim() >= dim]
    return any(bool((v != v.narrow(-dim, 0, 1)).any()) for v in bounds)


class _OnLine(Reparam):
    """Samples a site on the real line, from where it is mapped onto its support."""

    def apply(self, msg: Any) -> Any:
        fn, to_support = msg["fn"], biject_to(msg["fn"].support)
        free = dist.TransformedDistribution(fn, [to_support.inv])
        value = to_support(pyro.sample(f"{msg['name']}_free", free))
        made = dist.Delta(value, event_dim=fn.event_dim).mask(False)
        return {"fn": made, "value": value, "is_observed": True}


def with_fixed_supports(model: Model, names: Iterable[str]) -> Model:
    """Return the model with sites of moving supports as maps of sites on the real line."""
    config: dict[str, Reparam] = dict.fromkeys(names, _OnLine())
    return under(model, lambda _: ReparamMessenger(config))
