"""FedVI's guide: a network maps features of a client's rows, without labels, to its local head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import softplus

from hierfl.data.batch import ClientBatch
from hierfl.guides.amortized import layer
from hierfl.program.sites import Guide, Latents, Model, family


@family
def constructed(
    model: Model,
    latents: Latents,
    *,
    features: Callable[[ClientBatch], Tensor],
    scale: float,
    hidden: int = 256,
    pool: Literal["features", "outputs"] = "features",
    gain: float = 0.01,
) -> Guide:
    """Build FedVI's guide: a network infers a client's head from the mean of its features.

        (m_k, raw_k, bias_k) = P(mean over rows of the features)
        q(beta_k) = Normal(m_k, s_k^2),    q(bias_k) = a point at bias_k

    P is dense-relu-dense-relu-dense, and s = softplus(raw + c) with c such that s starts at
    `scale`. The mean over rows makes the result independent of their order. Global sites, such as
    the noise scale of a likelihood, are points.

    Params: `constructor.<layer>.weight` and `.bias`, and `<site>.at` (unconstrained) of each global
    site; all global.

    Args:
        model: with the sites `beta` and `bias` of `hierfl.models.PersonalHeads`.
        latents: the latent sites of the model.
        features: maps a batch to (C, B, F) by the model's own params: `heads.global_features`.
        scale: initial standard deviation, > 0; use that of the prior.
        hidden: width of P. Default: the paper's.
        pool: what is averaged over the rows: "features", the inputs of P, or "outputs", its
            outputs. The paper does not say which.
        gain: factor on the initial weights of the last layer. A small gain starts the posteriors
            near the prior.

    Reference: Vedadi et al. 2023, arXiv:2305.13672.
    """
    sites = {site.name: site for site in latents.sites}
    heads, classes = sites["beta"].event_shape
    offset = math.log(math.expm1(scale))

    def guide(batch: ClientBatch) -> None:
        for site in latents.global_block.sites:  # those of the likelihood, such as a noise scale
            free = pyro.param(f"{site.name}.at", site.free_start.clone)
            point = dist.Delta(site.transform(free), event_dim=len(site.event_shape))
            pyro.sample(site.name, point)
        rows, mask = features(batch), batch.mask()[..., None]

        def averaged(values: Tensor) -> Tensor:
            weight = mask.to(values.dtype)
            # a client without rows has the mean 0, not NaN
            return (values * weight).sum(1) / weight.sum(1).clamp(min=1.0)

        summary = averaged(rows) if pool == "features" else rows
        for name in ("1", "2"):
            summary = torch.relu(layer(f"constructor.{name}", summary, hidden))
        output = layer("constructor.last", summary, (2 * heads + 1) * classes, gain=gain)
        output = averaged(output) if pool == "outputs" else output
        mean, raw, bias = output[:, None].split((heads * classes, heads * classes, classes), -1)
        shape = (*mean.shape[:2], heads, classes)
        with batch.clients():
            normal = dist.Normal(mean.reshape(shape), softplus(raw.reshape(shape) + offset))
            pyro.sample("beta", normal.to_event(2))
            pyro.sample("bias", dist.Delta(bias, event_dim=1))

    return guide
