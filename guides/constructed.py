"""FedVI's posterior constructor: a network from features of a client's rows, labels unseen, to its own head."""

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
from hierfl.guides.amortised import layer
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
    """q(beta_k) = Normal(m_k, s_k^2), bias_k a point: (m_k, raw_k, bias_k) = P(mean of the features over the client's rows).

    P is dense-relu-dense-relu-dense, s = softplus(raw + c) with c such that s starts at `scale`. The order of rows is nothing.
    Global sites, such as a likelihood's noise scale, are points.

    Args:
        model: with the sites `beta` and `bias` of `hierfl.models.PersonalHeads`.
        latents: the model's.
        features: batch -> (C, B, F), with the model's own params: `heads.global_features`.
        scale: standard deviations it starts with, the prior's.
        hidden: width of P. Default: the paper's.
        pool: what is averaged over the rows: what goes into P, or what comes out (the paper says neither).
        gain: of the last layer's start; small: posteriors start near the prior.
    """
    sites = {site.name: site for site in latents.sites}
    heads, classes = sites["beta"].event_shape
    middle = math.log(math.expm1(scale))

    def guide(batch: ClientBatch) -> None:
        for site in latents.global_block.sites:  # of the likelihood: a noise scale, say
            free = pyro.param(f"{site.name}.at", site.free_start.clone)
            pyro.sample(
                site.name, dist.Delta(site.transform(free), event_dim=len(site.event_shape))
            )
        rows, there = features(batch), batch.mask()[..., None]

        def averaged(each: Tensor) -> Tensor:
            weight = there.to(each.dtype)
            return (each * weight).sum(1) / weight.sum(1).clamp(
                min=1.0
            )  # a client of no rows: of zeros, not of nothing

        summary = averaged(rows) if pool == "features" else rows
        for name in ("1", "2"):
            summary = torch.relu(layer(f"constructor.{name}", summary, hidden))
        out = layer("constructor.last", summary, (2 * heads + 1) * classes, gain=gain)
        out = averaged(out) if pool == "outputs" else out
        mean, raw, bias = out[:, None].split((heads * classes, heads * classes, classes), -1)
        shape = (*mean.shape[:2], heads, classes)
        with batch.clients():
            pyro.sample(
                "beta",
                dist.Normal(mean.reshape(shape), softplus(raw.reshape(shape) + middle)).to_event(2),
            )
            pyro.sample("bias", dist.Delta(bias, event_dim=1))

    return guide
