"""The guide of FedPop: points for global sites, and for local sites one of the kept draws."""

import math

import pyro
import torch

from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.guides.global_sites import emit
from hierfl.program.sites import Guide, Latents, Model, family

POINTS = "_local.points"


@family
def kept_draws(model: Model, latents: Latents, *, size: int = 100) -> Guide:
    """Build a guide whose local sites visit `size` kept draws, `_local.points` (C, 1, size, D), once each."""
    block, above = latents.local_block, Latents(latents.global_block.sites)
    stride = next(n for n in range(round(0.618 * size), 2 * size + 2) if math.gcd(n, size) == 1)
    points_of_globals = delta.build(model, above)

    def guide(batch: ClientBatch) -> None:
        points_of_globals(batch)
        if not block.size:
            return
        with batch.clients():
            start = block.start.reshape(1, 1, 1, -1)
            points = pyro.param(POINTS, start.expand(batch.num_clients, 1, size, -1).clone())
        number = torch.as_tensor(batch.words[-1] if batch.words else 0).long()
        first = batch.own_keys[:, 0].long() & 0x7FFFFFFF
        which = ((first + number * stride) % size)[:, None, None, None]
        vector = points.gather(2, which.expand(-1, 1, 1, block.size))[:, :, 0]
        emit(block, vector, batch)

    return guide
