"""The unrolled guide: a client's posterior results from a few gradient steps from its prior."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.func import grad

from hierfl.core import noise
from hierfl.data.batch import ClientBatch
from hierfl.guides.global_sites import Shared, emit, full_normal
from hierfl.laplace.mode import LogDensity, client_density, prior_center
from hierfl.program.sites import Guide, Latents, Model, family


@family
def unrolled(
    model: Model,
    latents: Latents,
    *,
    steps: int = 5,
    lr: float = 0.1,
    shared: Shared = full_normal,
    init_scale: float = 0.1,
    through: bool = True,
) -> Guide:
    """Build a guide in which each client takes a few gradient steps on -ELBO from its prior.

        q(w_k | z) = Normal(m, s^2),    phi = (m, log s)
        phi <- phi - lr grad_phi [ -E_q log p(y_k, w_k | z) - entropy(q) ] / n_k,    `steps` times

    m starts at the center of the client's prior given z. Clients keep no state; a new client takes
    the same steps. This is the inner loop of FedABML (Liu et al. 2023, Eq. 3.8), with MAML's
    derivative through the steps or without.

    Params: those of `shared`, and `_local.log_scale` (D,), the initial log s, global.

    Args:
        model: the model, whose log joint the steps follow.
        latents: the latent sites of the model.
        steps: number of gradient steps.
        lr: step size, for a loss per row.
        shared: posterior of the global sites, from `hierfl.guides.global_sites`.
        init_scale: initial value of s in `_local.log_scale`, > 0.
        through: whether gradients flow through the steps (second order) or take their result as
            given (first order).
    """
    block = latents.local_block
    posterior = shared(latents.global_block) if latents.global_block.size else None

    def guide(batch: ClientBatch) -> None:
        values = posterior(batch).values if posterior else {}
        if not block.size:
            return
        held = values if through else {name: value.detach() for name, value in values.items()}
        density = client_density(model, block, held, batch)
        start = prior_center(model, latents, held, batch)
        first = torch.full((block.size,), init_scale).log()
        log_scale = pyro.param("_local.log_scale", first).expand_as(start)
        mean, log_scale = _unroll(density, start, log_scale, batch, steps, lr)
        with batch.clients():
            normal = dist.Normal(mean, log_scale.exp()).to_event(1)
            vector = pyro.sample("_local", normal, infer={"is_auxiliary": True})
        emit(block, vector, batch)

    return guide


def _unroll(
    density: LogDensity, mean: Tensor, log_scale: Tensor, batch: ClientBatch, steps: int, lr: float
) -> tuple[Tensor, Tensor]:
    """Return m and log s after the gradient steps, each with fresh noise."""
    per_row = batch.counts[:, None, None]
    for k in range(steps):
        key = noise.fold(batch.key, noise.word("_unrolled"), k)
        eps = noise.normals(key, tuple(mean.shape[1:]), mean.dtype)

        def loss(m: Tensor, s: Tensor, eps: Tensor = eps) -> Tensor:
            return -density(m + s.exp() * eps).sum() - s.sum()

        by_mean, by_scale = grad(loss, (0, 1))(mean, log_scale)
        mean, log_scale = mean - lr * by_mean / per_row, log_scale - lr * by_scale / per_row
    return mean, log_scale
