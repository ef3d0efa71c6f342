"""Amortised by optimisation: a client's posterior is what a few gradient steps from its prior make of its rows."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.func import grad

from hierfl.core import noise
from hierfl.data.batch import ClientBatch
from hierfl.guides.global_sites import Shared, emit, full_normal
from hierfl.laplace.mode import LogDensity, client_density, prior_centre
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
    """q(w_k | z) = Normal(m, s^2) after `steps` gradient steps on client k's own negative ELBO per row, from its prior's centre.

    phi <- phi - lr grad_phi [ -E_q log p(y_k, w_k | z) - entropy(q) ] / n_k,  phi = (m, log s). Clients keep nothing; a new
    client takes the same steps. FedABML's inner loop (Liu et al. 2023, Eq. 3.8), with MAML's derivative through it or without.

    Args:
        model: the program; its own log joint is what is followed.
        latents: the model's.
        steps: k.
        lr: step size, of a loss per row.
        shared: the posterior of the global sites.
        init_scale: the standard deviations it starts with.
        through: whether gradients flow through the steps (second order), or take their end as given (first order).
    """
    block = latents.local_block
    posterior = shared(latents.global_block) if latents.global_block.size else None

    def guide(batch: ClientBatch) -> None:
        values = posterior(batch).values if posterior else {}
        if not block.size:
            return
        held = values if through else {name: value.detach() for name, value in values.items()}
        density = client_density(model, block, held, batch)
        start = prior_centre(model, latents, held, batch)
        log_scale = pyro.param(
            "_local.log_scale", torch.full((block.size,), init_scale).log()
        ).expand_as(start)
        mean, log_scale = _unroll(density, start, log_scale, batch, steps, lr)
        with batch.clients():
            normal = dist.Normal(mean, log_scale.exp()).to_event(1)
            vector = pyro.sample("_local", normal, infer={"is_auxiliary": True})
        emit(block, vector, batch)

    return guide


def _unroll(
    density: LogDensity, mean: Tensor, log_scale: Tensor, batch: ClientBatch, steps: int, lr: float
) -> tuple[Tensor, Tensor]:
    per_row = batch.counts[:, None, None]
    for k in range(steps):
        key = noise.fold(batch.key, noise.word("_unrolled"), k)
        eps = noise.normals(key, tuple(mean.shape[1:]), mean.dtype)

        def loss(m: Tensor, s: Tensor, eps: Tensor = eps) -> Tensor:
            return -density(m + s.exp() * eps).sum() - s.sum()

        by_mean, by_scale = grad(loss, (0, 1))(mean, log_scale)
        mean, log_scale = mean - lr * by_mean / per_row, log_scale - lr * by_scale / per_row
    return mean, log_scale
