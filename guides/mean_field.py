"""The mean-field guide: an independent Normal for every number."""

import pyro
import pyro.distributions as dist
import torch

from hierfl.data.batch import ClientBatch
from hierfl.program.sites import Guide, Latents, Model, family, repeat_over_clients
from hierfl.program.supports import ScaleLink, scale_constraint


@family
def mean_field(
    model: Model, latents: Latents, *, init_scale: float = 0.1, scale_link: ScaleLink = "softplus"
) -> Guide:
    """Build a guide of independent Normals on the unconstrained entries of all sites.

        q = prod over sites of Normal(loc, scale^2)

    The KL to a Normal prior is in closed form. The guide underestimates the spread of a hierarchy's
    scale, and its local sites do not follow the global ones: see `structured`.

    Params: `<site>.loc` and `<site>.scale` > 0 for each site; (..., C, 1, *event) for local ones.

    Args:
        model: unused; all guide families have the same signature.
        latents: the latent sites of the model.
        init_scale: initial standard deviation, > 0. Default 0.1, as in Pyro's AutoNormal.
        scale_link: "softplus" or "exp", the function from a real number to a scale; see
            `hierfl.program.supports`.

    Raises:
        ValueError: `scale_link` is neither "softplus" nor "exp".
    """
    positive = scale_constraint(scale_link)

    def guide(batch: ClientBatch) -> None:
        for site in latents.sites:
            with site.within(batch):
                start = repeat_over_clients(site, site.free_start, batch)
                loc = pyro.param(f"{site.name}.loc", start)
                wide = torch.full_like(loc, init_scale)
                scale = pyro.param(f"{site.name}.scale", wide, constraint=positive)
                fn = dist.Normal(loc, scale).to_event(site.free_event_dim)
                if not site.is_real:
                    fn = dist.TransformedDistribution(fn, [site.transform])
                pyro.sample(site.name, fn)

    return guide
