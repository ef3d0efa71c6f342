"""Amortised: a network, the same for all clients, from a client's rows to the posterior of its own sites."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.data.batch import ClientBatch
from hierfl.guides.global_sites import Shared, emit, full_normal
from hierfl.program.sites import Guide, Latents, Model, family


@family
def amortised(
    model: Model,
    latents: Latents,
    *,
    fields: tuple[str, ...] | None = None,
    hidden: int = 32,
    shared: Shared = full_normal,
    init_scale: float = 0.1,
) -> Guide:
    """q(w_k | rows of k) = Normal(m, s^2), (m, log s) = B(mean over rows of A(row), log n_k): a set network, so order is nothing.

    A and B are networks of two layers (Zaheer et al. 2017, arXiv:1703.06114). Every weight is global: clients keep nothing, and a
    client never seen is inferred without a single step. Rows should be standardised.

    Args:
        model: unused; families have one signature.
        latents: the model's.
        fields: what the network reads of a row; None: every field, labels too. Without the labels, a client that has none is
            personalised all the same.
        hidden: width of all layers.
        shared: the posterior of the global sites.
        init_scale: the standard deviations it starts with.
    """
    block = latents.local_block
    posterior = shared(latents.global_block) if latents.global_block.size else None

    def guide(batch: ClientBatch) -> None:
        if posterior:
            posterior(batch)
        if not block.size:
            return
        summary = _summary(_rows(batch, fields), batch, hidden)
        out = layer("_encoder.last", summary, 2 * block.size, gain=0.01)[:, None]
        move, raw = out.split(block.size, -1)
        scale = init_scale * raw.exp()
        with batch.clients():
            normal = dist.Normal(block.start + move, scale).to_event(1)
            vector = pyro.sample("_local", normal, infer={"is_auxiliary": True})
        emit(block, vector, batch)

    return guide


def _rows(batch: ClientBatch, fields: tuple[str, ...] | None) -> Tensor:
    """What the network reads, (C, B, F): fields side by side."""
    names = (
        tuple(sorted(batch.fields)) if fields is None else fields
    )  # data given in another order are the same data
    missing = [name for name in names if batch.fields.get(name) is None]
    if missing:
        raise ValueError(
            f"the amortised guide reads the field '{missing[0]}', which these data lack: give it, or fit with "
            f"guides.amortised(fields=...) without it"
        )
    parts = [getattr(batch, name).to(batch.counts.dtype) for name in names]
    return torch.cat([p.reshape(*p.shape[:2], -1) for p in parts], -1)


def _summary(rows: Tensor, batch: ClientBatch, hidden: int) -> Tensor:
    """(C, hidden): permutation-invariant, padding left out."""
    each = torch.relu(layer("_encoder.row1", rows, hidden))
    each = torch.relu(layer("_encoder.row2", each, hidden))
    there = batch.mask()[..., None].to(each.dtype)
    mean = (each * there).sum(1) / there.sum(1)
    return torch.relu(
        layer("_encoder.set", torch.cat([mean, batch.counts.log()[:, None]], -1), hidden)
    )


def layer(name: str, x: Tensor, width: int, gain: float = 1.0) -> Tensor:
    """An affine layer of two global params, started as He et al. 2015 start a layer before a rectifier."""
    fan = x.shape[-1]
    start = (
        gain
        * (2.0 / fan) ** 0.5
        * noise.normals(noise.fold(noise.root_key(0), noise.word(name)), (fan, width))
    )
    return x @ pyro.param(f"{name}.weight", start) + pyro.param(f"{name}.bias", torch.zeros(width))
