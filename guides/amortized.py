"""Guides of one network for all clients, which maps a client's rows to its local posterior; and FedVI's."""

import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import softplus

from hierfl.core import noise
from hierfl.data.batch import ClientBatch
from hierfl.guides.global_sites import Shared, emit, full_normal
from hierfl.program.sites import Guide, Latents, Model, family


@family
def constructed(
    model: Model,
    latents: Latents,
    *,
    features: Callable[[ClientBatch], Tensor],
    scale: float,
    hidden: int = 256,
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
        rows = features(batch)
        weight = batch.mask()[..., None].to(rows.dtype)
        # a client without rows has the mean 0, not NaN
        summary = (rows * weight).sum(1) / weight.sum(1).clamp(min=1.0)
        for name in ("1", "2"):
            summary = torch.relu(layer(f"constructor.{name}", summary, hidden))
        output = layer("constructor.last", summary, (2 * heads + 1) * classes, gain=gain)
        mean, raw, bias = output[:, None].split((heads * classes, heads * classes, classes), -1)
        shape = (*mean.shape[:2], heads, classes)
        with batch.clients():
            normal = dist.Normal(mean.reshape(shape), softplus(raw.reshape(shape) + offset))
            pyro.sample("beta", normal.to_event(2))
            pyro.sample("bias", dist.Delta(bias, event_dim=1))

    return guide


@family
def amortized(
    model: Model,
    latents: Latents,
    *,
    fields: tuple[str, ...] | None = None,
    hidden: int = 32,
    shared: Shared = full_normal,
    init_scale: float = 0.1,
) -> Guide:
    """Build a guide in which one network for all clients infers local sites from rows.

        q(w_k | rows of k) = Normal(m, s^2),    (m, log s) = B(mean over rows of A(row), log n_k)

    A and B are networks of two layers (Zaheer et al. 2017, arXiv:1703.06114). The mean over rows
    makes the result independent of their order. m and log s are relative to the prior's middle and
    to `init_scale`. Every weight is global: clients keep no state, and a new client is inferred
    without a single step. Rows should be standardized.

    Params: those of `shared`, and `_encoder.<layer>.weight` and `.bias`, all global.

    Args:
        model: unused; all guide families have the same signature.
        latents: the latent sites of the model.
        fields: names of the fields that the network reads. Default None: every field, labels
            included. Without the labels, a client that has none can be personalized all the same.
        hidden: width of all layers.
        shared: posterior of the global sites, from `hierfl.guides.global_sites`.
        init_scale: initial standard deviation of the local sites, unconstrained, > 0.

    Raises:
        ValueError: the data do not have one of the fields. This is found when the guide runs.
    """
    block = latents.local_block
    posterior = shared(latents.global_block) if latents.global_block.size else None

    def guide(batch: ClientBatch) -> None:
        if posterior:
            posterior(batch)
        if not block.size:
            return
        summary = _summary(_rows(batch, fields), batch, hidden)
        output = layer("_encoder.last", summary, 2 * block.size, gain=0.01)[:, None]
        shift, log_scale = output.split(block.size, -1)
        scale = init_scale * log_scale.exp()
        with batch.clients():
            normal = dist.Normal(block.start + shift, scale).to_event(1)
            vector = pyro.sample("_local", normal, infer={"is_auxiliary": True})
        emit(block, vector, batch)

    return guide


def _rows(batch: ClientBatch, fields: tuple[str, ...] | None) -> Tensor:
    """Return what the network reads, (C, B, F): the fields side by side."""
    # sorted, so that the order in which the fields were given has no effect
    names = tuple(sorted(batch.fields)) if fields is None else fields
    missing = [name for name in names if batch.fields.get(name) is None]
    if missing:
        raise ValueError(
            f"the amortized guide reads the field '{missing[0]}', which the data do not have: "
            f"add it, or leave it out with guides.amortized(fields=...)"
        )
    fields_read = [getattr(batch, name).to(batch.counts.dtype) for name in names]
    return torch.cat([part.reshape(*part.shape[:2], -1) for part in fields_read], -1)


def _summary(rows: Tensor, batch: ClientBatch, hidden: int) -> Tensor:
    """Return a summary of each client's rows, (C, hidden), whatever their order and padding."""
    encoded = torch.relu(layer("_encoder.row1", rows, hidden))
    encoded = torch.relu(layer("_encoder.row2", encoded, hidden))
    mask = batch.mask()[..., None].to(encoded.dtype)
    mean = (encoded * mask).sum(1) / mask.sum(1)
    of_set = torch.cat([mean, batch.counts.log()[:, None]], -1)
    return torch.relu(layer("_encoder.set", of_set, hidden))


def layer(name: str, x: Tensor, width: int, gain: float = 1.0) -> Tensor:
    """Apply a dense layer of global params to (..., F), which start as He et al. 2015 times `gain`."""
    fan = x.shape[-1]
    key = noise.fold(noise.root_key(0), noise.word(name))
    start = gain * (2.0 / fan) ** 0.5 * noise.normals(key, (fan, width))
    return x @ pyro.param(f"{name}.weight", start) + pyro.param(f"{name}.bias", torch.zeros(width))
