"""The low-rank guide: the strongest correlations among local sites, and among global ones."""

from functools import partial

import pyro
import pyro.distributions as dist
import torch

from hierfl.core import noise
from hierfl.core.arguments import expect
from hierfl.data.batch import ClientBatch
from hierfl.guides.global_sites import emit, low_rank_normal, positive
from hierfl.program.sites import Guide, Latents, Model, family


@family
def low_rank(model: Model, latents: Latents, *, rank: int = 4, init_scale: float = 0.1) -> Guide:
    """Build a guide of low-rank Normals: one for the global sites, one per client's local sites.

        q = Normal(loc, S (F F' + I) S),    S = diag(scale),  F with `rank` columns

    It has 2 + rank params for each unconstrained number. Pyro's AutoLowRankMultivariateNormal is a
    single Normal over all sites of all clients, which no client could hold alone.

    Params:

    * those of `hierfl.guides.global_sites.low_rank_normal`, global.
    * `_local.loc` (C, 1, D), `_local.scale` (C, 1, D) > 0 and `_local.factor` (C, 1, D, rank),
      local.

    Args:
        model: unused; all guide families have the same signature.
        latents: the latent sites of the model.
        rank: number of columns of F, 1 or more.
        init_scale: initial value of `scale`, > 0; F starts near 0. Default 0.1, as in Pyro's
            AutoNormal.

    Raises:
        ValueError: `rank` is less than 1.
    """
    expect(rank=(rank, "[1, inf)"))
    block = latents.local_block
    shared = partial(low_rank_normal, rank=rank, init_scale=init_scale)
    posterior = shared(latents.global_block) if latents.global_block.size else None
    key = noise.fold(noise.root_key(0), noise.word("_local.factor"))
    start_factor = 0.1 * noise.normals(key, (1, 1, block.size, rank))

    def guide(batch: ClientBatch) -> None:
        if posterior:
            posterior(batch)
        if not block.size:
            return
        with batch.clients():
            c = batch.num_clients
            loc = pyro.param("_local.loc", block.start.repeat(c, 1, 1))
            wide = torch.full((c, 1, block.size), init_scale)
            scale = pyro.param("_local.scale", wide, constraint=positive)
            factor = pyro.param("_local.factor", start_factor.repeat(c, 1, 1, 1))
            fn = dist.LowRankMultivariateNormal(loc, scale[..., None] * factor, scale**2)
            vector = pyro.sample("_local", fn, infer={"is_auxiliary": True})
        emit(block, vector, batch)

    return guide
