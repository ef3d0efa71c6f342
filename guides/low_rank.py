"""Low rank: the strongest correlations of a client's own sites, and of the global ones."""

from __future__ import annotations

from functools import partial

import pyro
import pyro.distributions as dist
import torch

from hierfl.core import noise
from hierfl.data.batch import ClientBatch
from hierfl.guides.global_sites import emit, low_rank_normal, positive
from hierfl.program.sites import Guide, Latents, Model, family


@family
def low_rank(model: Model, latents: Latents, *, rank: int = 4, init_scale: float = 0.1) -> Guide:
    """Q = Normal(loc, S (F F' + I) S) for the global sites, and one for each client's own; (2 + rank) numbers a number.

    Pyro's AutoLowRankMultivariateNormal is one vector over all sites of all clients, which no client could hold alone.

    Args:
        model: unused; families have one signature.
        latents: the model's.
        rank: columns of F.
        init_scale: the standard deviations it starts with.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}: it must be 1 or more (mean_field has none)")
    block = latents.local_block
    posterior = (
        partial(low_rank_normal, rank=rank, init_scale=init_scale)(latents.global_block)
        if latents.global_block.size
        else None
    )
    start = 0.1 * noise.normals(
        noise.fold(noise.root_key(0), noise.word("_local.factor")), (1, 1, block.size, rank)
    )

    def guide(batch: ClientBatch) -> None:
        if posterior:
            posterior(batch)
        if not block.size:
            return
        with batch.clients():
            c = batch.num_clients
            loc = pyro.param("_local.loc", block.start.repeat(c, 1, 1))
            scale = pyro.param(
                "_local.scale", torch.full((c, 1, block.size), init_scale), constraint=positive
            )
            factor = pyro.param("_local.factor", start.repeat(c, 1, 1, 1))
            fn = dist.LowRankMultivariateNormal(loc, scale[..., None] * factor, scale**2)
            vector = pyro.sample("_local", fn, infer={"is_auxiliary": True})
        emit(block, vector, batch)

    return guide
