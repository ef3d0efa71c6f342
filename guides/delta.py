"""The MAP guide: a point for every site."""

import pyro
import pyro.distributions as dist

from hierfl.data.batch import ClientBatch
from hierfl.program.sites import Guide, Latents, Model, family, repeat_over_clients


@family
def delta(model: Model, latents: Latents) -> Guide:
    """Build a guide of points, one for each site.

    The ELBO is then the log joint density in the sites' own coordinates, and its maximum is the MAP
    estimate.

    Params: `<site>.at` for each site, unconstrained; (..., C, 1, *event) for local ones.

    Args:
        model: unused; all guide families have the same signature.
        latents: the latent sites of the model.
    """

    def guide(batch: ClientBatch) -> None:
        for site in latents.sites:
            with site.within(batch):
                start = repeat_over_clients(site, site.free_start, batch)
                value, _ = site.constrain(pyro.param(f"{site.name}.at", start))
                pyro.sample(site.name, dist.Delta(value, event_dim=len(site.event_shape)))

    return guide
