"""What the server believes of any client's v: moments of p(v | z) over draws of z."""

from __future__ import annotations

import torch
from pyro import poutine
from torch import Tensor

from hierfl.core import noise
from hierfl.program.few_rows import in_double
from hierfl.program.handlers import Answer, NoKeyedDraw, untouched_store
from hierfl.program.traces import Site
from hierfl.summaries.hierarchy import Factors, Hierarchy
from hierfl.summaries.surrogate import Surrogate

DRAWS = 1000  # of the prior, and of the surrogate while the factors still move
FEW = 300  # of a prior that is drawn from draw by draw, such as a Gamma
# share of the draws whose variances are averaged: those of a Cauchy prior have no mean
CENTRAL = 0.9
WIDE = 2.5  # sd of an unconstrained number whose prior cannot be drawn from


def prior_draws(hierarchy: Hierarchy, seed: int) -> Tensor:
    """Return draws of the global sites from their prior (Normal if it is improper), (S, K)."""
    program, block = hierarchy.program, hierarchy.program.latents.global_block
    batch = in_double(hierarchy.row)

    def one(d: int | Tensor) -> Tensor:
        drawn = batch.redrawn(noise.word("prior")).redrawn(d)
        with Answer({}, drawn, reparameterized=False):
            nodes: dict[str, Site] = poutine.trace(program.model).get_trace(drawn).nodes
        return block.flatten({site.name: nodes[site.name]["value"] for site in block.sites})

    with untouched_store():
        try:
            found = torch.vmap(one)(torch.arange(DRAWS, dtype=torch.int32))
        except (RuntimeError, ValueError, NotImplementedError):
            try:
                alone = _independent(hierarchy, seed)
                found = torch.stack([one(d) for d in range(FEW)]) if alone is None else alone
            except (NoKeyedDraw, NotImplementedError):
                g = torch.Generator().manual_seed(seed & 0x7FFFFFFF)
                away = torch.randn(DRAWS, block.size, generator=g, dtype=torch.float64)
                return block.start.double() + WIDE * away
    low, high = (found.quantile(q, 0) for q in (0.01, 0.99))
    return found.nan_to_num().clamp(low, high)


def _independent(hierarchy: Hierarchy, seed: int) -> Tensor | None:
    """Return draws of a prior whose global sites are independent, from one trace; else None."""
    block, zero = hierarchy.program.latents.global_block, torch.zeros(hierarchy.reading.own_size)
    start = block.start.double()
    here, there = (hierarchy.sites(start + by, zero, hierarchy.row) for by in (0.0, 0.7))
    for site in block.sites:
        value = here[site.name]["value"]
        one, other = (sites[site.name]["fn"].log_prob(value) for sites in (here, there))
        if not torch.equal(one, other):
            return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed & 0x7FFFFFFF)
        values = {s.name: here[s.name]["fn"].sample((DRAWS,)) for s in block.sites}
    return torch.vmap(block.flatten)(values)


def mixing_draws(hierarchy: Hierarchy, draws: Tensor, seed: int) -> Tensor | None:
    """Return draws of any client's t from about its prior, (S, M), by those of z; or None."""
    mixing, program = hierarchy.mixing, hierarchy.program
    if mixing is None:
        return None
    batch, block = in_double(hierarchy.row), program.latents.local_block
    g = torch.Generator().manual_seed(seed & 0x7FFFFFFF)
    normal = torch.randn(len(draws), mixing.size - len(mixing.outside), generator=g)

    def one(z: Tensor, e: Tensor, d: int | Tensor) -> Tensor:
        values = program.latents.global_block.unflatten(z)[0]
        drawn = batch.redrawn(noise.word("mixing")).redrawn(d)
        with Answer({}, drawn, reparameterized=False):
            model = poutine.condition(program.model, data=values)
            nodes: dict[str, Site] = poutine.trace(model).get_trace(drawn).nodes
        own = block.flatten({site.name: nodes[site.name]["value"] for site in block.sites})
        mean, sd = mixing.guess(nodes, 1)
        return torch.cat([own[0, 0, mixing.outside], mean[0] + sd[0] * e])

    with untouched_store():
        try:
            found = torch.vmap(one)(draws, normal, torch.arange(len(draws), dtype=torch.int32))
        except (RuntimeError, ValueError, NotImplementedError):
            few = min(FEW, len(draws))
            each = [one(draws[d], normal[d], d) for d in range(few)]
            found = torch.stack(each)[torch.arange(len(draws)) % few]
    low, high = (found.quantile(q, 0) for q in (0.01, 0.99))
    return found.nan_to_num().clamp(low, high)


def any_client(
    surrogate: Surrogate, draws: Tensor, log_weights: Tensor, factors: Factors
) -> tuple[Tensor, Tensor]:
    """Return mean (V,) and covariance (V, V) of p(v | z) over weighted draws of z and clients."""
    draws = draws[:, : len(surrogate.hierarchy.reading.origin)]
    mixing = mixing_draws(surrogate.hierarchy, draws, 0)
    means, covariances = surrogate.moments(draws, factors, mixing)  # (S, C, V), (S, C, D, D)
    count, size = means.shape[1], covariances.shape[-1]
    share = log_weights.exp()
    if size:
        wide = covariances.diagonal(dim1=-2, dim2=-1).sum((-2, -1))
        share = torch.where(wide <= wide.quantile(CENTRAL), share, 0.0)
        share = share / share.sum()
    mean = torch.tensordot(share, means.mean(1), 1)
    away = (means - mean).flatten(0, 1)
    each = share.repeat_interleave(count) / count
    covariance = away.mT @ (away * each[:, None])
    within = torch.tensordot(share, covariances.mean(1), 1)
    covariance[:size, :size] += within
    eye = torch.eye(len(mean), dtype=mean.dtype)
    return mean, covariance + 1e-9 * covariance.diagonal().mean() * eye
