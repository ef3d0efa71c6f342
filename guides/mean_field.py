"""Mean field: a Normal for every number, none correlated with another."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch.distributions import constraints

from hierfl.data.batch import ClientBatch
from hierfl.program.scale_links import ScaleLink, scale_constraint
from hierfl.program.sites import Guide, Latents, LatentSite, Model, family, repeat_over_clients


@family
def mean_field(
    model: Model, latents: Latents, *, init_scale: float = 0.1, scale_link: ScaleLink = "softplus"
) -> Guide:
    """Q = prod over sites of Normal(loc, scale^2) on the unconstrained numbers; KL to a Normal prior in closed form.

    The spread of a hierarchy's scale is too small under it, and local sites do not follow the global ones: see `structured`.

    Params, by site: `<site>.loc`, `<site>.scale` > 0.

    Args:
        model: unused; families have one signature.
        latents: the model's.
        init_scale: the standard deviations it starts with (0.1 as Pyro's AutoNormal).
        scale_link: they are softplus of what is learned, or exp: see `hierfl.program.scale_links`.

    Raises:
        ValueError: another link.
    """
    positive = scale_constraint(scale_link)

    def guide(batch: ClientBatch) -> None:
        for site in latents.sites:
            with site.within(batch):
                loc = pyro.param(
                    f"{site.name}.loc", repeat_over_clients(site, site.free_start, batch)
                )
                scale = pyro.param(
                    f"{site.name}.scale", torch.full_like(loc, init_scale), constraint=positive
                )
                normal = dist.Normal(loc, scale).to_event(site.free_event_dim)
                pyro.sample(
                    site.name,
                    normal
                    if is_real(site)
                    else dist.TransformedDistribution(normal, [site.transform]),
                )

    return guide


def is_real(site: LatentSite) -> bool:
    """Whether a site's values are any real numbers, so that it needs no transform."""
    support = site.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real
