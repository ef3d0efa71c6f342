"""The structured guide: local sites follow the global ones, as in the hierarchy."""

import pyro
import pyro.distributions as dist
import torch

from hierfl.data.batch import ClientBatch
from hierfl.guides.global_sites import Shared, emit, full_normal, positive
from hierfl.program.sites import Guide, Latents, Model, family


@family
def structured(
    model: Model,
    latents: Latents,
    *,
    shared: Shared = full_normal,
    full: bool | None = None,
    init_scale: float = 0.1,
) -> Guide:
    """Build a guide in which the mean of the local sites is linear in the global ones.

        q(z) q(w_k | z),    w_k = loc_k + slope_k e(z) + S_k U_k eps_k

    e(z) is the global vector about its mean, in units of its scale; S_k is a diagonal of scales,
    U_k unit lower triangular and eps_k standard normal.

    The guide is exact for a linear-Gaussian hierarchy with known variances. Where a *scale* is
    unknown, the client's mean is curved in it and a line is not: prefer `conditional`, or write the
    model non-centered. Largest error of a mean on radon, in posterior standard deviations (`python
    -m benchmarks.reference radon`): conditional 0.04, structured non-centered 0.10, structured
    centered 1.7.

    Params:

    * those of `shared`, global.
    * `_local.loc` (C, 1, D) and `_local.scale` (C, 1, D) > 0, local.
    * `_local.slope` (C, 1, D, K), local, if the model has global sites.
    * `_local.lower` (C, 1, D, D), local, with correlations: the strict lower triangle of U_k.

    Args:
        model: unused; all guide families have the same signature.
        latents: the latent sites of the model.
        shared: posterior of the global sites, from `hierfl.guides.global_sites`.
        full: whether a client's local sites are correlated given z. Default None: they are if D is
            at most 64.
        init_scale: initial standard deviation of the local sites given z, > 0. Default 0.1, as in
            Pyro's AutoNormal.

    Reference: Section 3 of SFVI, arXiv:2302.03314.
    """
    block = latents.local_block
    num_local, num_global = block.size, latents.global_block.size
    correlated = num_local <= 64 if full is None else full
    posterior = shared(latents.global_block) if num_global else None

    def guide(batch: ClientBatch) -> None:
        z = posterior(batch) if posterior else None
        if not num_local:
            return
        with batch.clients():
            c = batch.num_clients
            mean = pyro.param("_local.loc", block.start.repeat(c, 1, 1))
            wide = torch.full((c, 1, num_local), init_scale)
            scale = pyro.param("_local.scale", wide, constraint=positive)
            if z is not None:
                slope = pyro.param("_local.slope", torch.zeros(c, 1, num_local, num_global))
                mean = mean + (slope @ z.standard[..., None])[..., 0]
            if correlated:
                lower = pyro.param("_local.lower", torch.zeros(c, 1, num_local, num_local))
                unit = lower.tril(-1) + torch.eye(num_local)
                fn = dist.MultivariateNormal(mean, scale_tril=scale[..., None] * unit)
            else:
                fn = dist.Normal(mean, scale).to_event(1)
            vector = pyro.sample("_local", fn, infer={"is_auxiliary": True})
        emit(block, vector, batch)

    return guide
