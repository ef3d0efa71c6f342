"""Start values of local params: one client's, repeated where the clients stand."""

from __future__ import annotations

from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.program.sites import LatentSite


def each_client(site: LatentSite, start: Tensor, batch: ClientBatch) -> Tensor:
    """A start of a site's param, (*batch, *event) with the clients' dimension as long as the batch has clients."""
    if not site.is_local:
        return start
    axis = len(site.batch_shape) - 2
    return start.repeat_interleave(batch.num_clients, dim=axis)
