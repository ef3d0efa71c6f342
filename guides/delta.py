"""MAP: a point for every site."""

from __future__ import annotations

import pyro
import pyro.distributions as dist

from hierfl.data.batch import ClientBatch
from hierfl.program.sites import Guide, Latents, Model, family, repeat_over_clients


@family
def delta(model: Model, latents: Latents) -> Guide:
    """Q = a point at each site: the ELBO is the log joint density, its maximum the MAP estimate, in the sites' own coordinates.

    Params, by site: `<site>.at`, unconstrained.
    """

    def guide(batch: ClientBatch) -> None:
        for site in latents.sites:
            with site.within(batch):
                value, _ = site.constrain(
                    pyro.param(f"{site.name}.at", repeat_over_clients(site, site.free_start, batch))
                )
                pyro.sample(site.name, dist.Delta(value, event_dim=len(site.event_shape)))

    return guide
