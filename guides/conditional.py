"""The conditional guide: a Laplace approximation in each client, given the global sites."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.data.batch import ClientBatch
from hierfl.guides.global_sites import Shared, emit, full_normal
from hierfl.laplace.mode import LogDensity, client_density, climb, mode_and_precision, prior_centre
from hierfl.program.sites import Guide, Latents, Model, family

WIDER = 1.1  # scale of the candidates, in those of Laplace's approximation


@family
def conditional(
    model: Model,
    latents: Latents,
    *,
    shared: Shared = full_normal,
    newton_steps: int = 5,
    candidates: int = 1,
) -> Guide:
    """Build a guide in which each client uses Laplace's approximation, given the global sites.

        q(z) q(w_k | z),    q(w_k | z) = Normal(mode, (minus the Hessian)^-1)  of log p(y_k, w_k | z) in w_k

    There are no local params. The approximation is exact for linear-Gaussian clients; for generalised linear
    ones it is what INLA does (Rue, Martino and Chopin 2009), here in each client.

    The default posterior of the global sites is Gaussian in unconstrained coordinates. A scale with a long
    tail (eight schools: few clients, half-Cauchy prior) needs `shared=spline_flow`: a Normal for its
    logarithm gives only 0.6 of its standard deviation.

    The guide needs all rows of a client at each step. It needs local sites whose log joint has a single mode
    and is curved there.

    Params: those of `shared`.

    Args:
        model: the model, whose log joint is maximised over the local sites.
        latents: the latent sites of the model.
        shared: posterior of the global sites, from `hierfl.guides.global_sites`.
        newton_steps: safeguarded Newton steps to the mode, before the one that gradients flow through. 0 is
            enough, and exact, where the rows and the local sites are Gaussian.
        candidates: draws of Laplace's approximation, widened by a tenth, of which one is kept with a
            probability proportional to its importance weight, p(y_k, w | z) over its density. Its own density
            is p(y_k, w | z) over the mean weight, an unbiased estimate of p(y_k | z). Default 1: the draws are
            those of Laplace's approximation.

    Raises:
        ValueError: after these steps, minus the Hessian of a client is not positive definite. This is found
            when the guide runs.
    """
    block = latents.local_block
    posterior = shared(latents.global_block) if latents.global_block.size else None

    def guide(batch: ClientBatch) -> None:
        values = posterior(batch).values if posterior else {}
        if not block.size:
            return
        density = client_density(model, block, values, batch)
        held = client_density(
            model, block, {name: value.detach() for name, value in values.items()}, batch
        )
        near = climb(held, prior_centre(model, latents, values, batch), steps=newton_steps)
        mode, precision = mode_and_precision(density, near)
        with batch.clients():
            try:
                normal = dist.MultivariateNormal(mode, precision_matrix=precision)
            except (RuntimeError, ValueError):  # torch's own message prints the whole matrix
                raise ValueError(
                    f"guides.conditional: after newton_steps={newton_steps}, the log joint of a client is "
                    f"not curved like that of a Gaussian: use more newton_steps, or guides.structured "
                    f"if its local sites have no single mode"
                ) from None
            if candidates > 1:
                normal = dist.MultivariateNormal(mode, scale_tril=WIDER * normal.scale_tril)
            vector = pyro.sample("_local", normal, infer={"is_auxiliary": True})
        if candidates > 1:
            first = normal.log_prob(vector)
            vector, log_q = _chosen(density, normal, vector, batch, candidates)
            moved = dist.Delta(torch.zeros_like(first), log_density=log_q - first)
            with batch.clients():
                pyro.sample("_local.chosen", moved, infer={"is_auxiliary": True})
        emit(block, vector, batch)

    return guide


def _chosen(
    density: LogDensity, normal: Any, first: Tensor, batch: ClientBatch, count: int
) -> tuple[Tensor, Tensor]:
    """Choose one of several draws of a Normal by importance weights.

    Args:
        density: (C, 1, D) -> (C,), the log joint of each client.
        normal: of batch shape (C, 1) and event shape (D,).
        first: (C, 1, D), its first draw.
        batch: whose keys the other draws are functions of.
        count: M, draws in all.

    Returns:
        The draw that is kept (C, 1, D), and the log density (C, 1) of the choice.
    """
    key = noise.fold(batch.key, noise.word("_local.candidates"))
    away = noise.normals(key, (count - 1, first.shape[-1]), first.dtype)  # (C, M - 1, D)
    others = normal.loc + away @ normal.scale_tril[:, 0].mT
    each = torch.cat([first, others], 1).movedim(1, 0)[:, :, None]  # (M, C, 1, D)
    joint = torch.vmap(density)(each)[..., None]  # (M, C, 1)
    log_weights = joint - normal.log_prob(each)
    uniform = noise.uniforms(noise.fold(batch.key, noise.word("_local.choice")), (1,), first.dtype)
    at = (log_weights.softmax(0).cumsum(0) < uniform).sum(0, keepdim=True).clamp(max=count - 1)
    kept = each.gather(0, at[..., None].expand(1, *each.shape[1:]))[0]
    evidence = log_weights.logsumexp(0) - math.log(count)
    return kept, joint.gather(0, at)[0] - evidence


conditional.build.reads_all_rows = True  # type: ignore[attr-defined]
