"""Terms of a program's log densities: of its negative ELBO and its log joint density."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import kl_divergence

from hierfl.data.batch import ClientBatch
from hierfl.program.handlers import Substitute
from hierfl.program.sites import Model, Values
from hierfl.program.traces import Site, is_likelihood, per_client, samples, scored, sums_by_owner


class Terms(NamedTuple):
    """One estimate of the negative ELBO in nats: `nll` and `local_kl` (C,) by client, and `global_kl` ()."""

    nll: Tensor
    local_kl: Tensor
    global_kl: Tensor

    def loss(self, share: float) -> Tensor:
        """Return each client's part of the negative ELBO, (C,): `share`, 1 / N, of `global_kl`."""
        return self.nll + self.local_kl + share * self.global_kl


def traces_of(
    model: Model,
    guide: Callable[[ClientBatch], Any],
    params: Mapping[str, Tensor],
    batch: ClientBatch,
    support: ClientBatch,
) -> tuple[Any, Any]:
    """Trace the guide, and the model at the guide's draws."""
    with Substitute(params, batch):
        guided = poutine.trace(guide).get_trace(support)
        return guided, poutine.trace(poutine.replay(model, guided)).get_trace(batch)


def elbo_terms(
    guide: Any,
    model: Any,
    batch: ClientBatch,
    *,
    closed: Collection[str],
    factors: Collection[str] = (),
) -> Terms:
    """Return the parts of the negative ELBO at one draw."""
    nll = torch.zeros(batch.num_clients, device=batch.counts.device)
    for _, site in samples(model):
        if is_likelihood(site, factors):
            nll = nll - per_client(scored(site, site["fn"].log_prob(site["value"])))
    return Terms(nll, *sums_by_owner(_log_ratios(guide, model, closed, factors), batch))


def _log_ratios(
    guide: Any, model: Any, closed: Collection[str], factors: Collection[str]
) -> Iterator[tuple[Site, Tensor]]:
    """Yield log q - log p of every site that is no likelihood, or its KL in closed form."""
    for name, site in samples(model):
        if is_likelihood(site, factors):
            continue
        guided = guide.nodes.get(name)
        if guided is None:  # a factor, or a global observation
            yield site, -site["fn"].log_prob(site["value"])
            continue
        q = guided["fn"]
        is_delta = isinstance(q, dist.Delta)
        if name in closed and not is_delta:
            yield site, divergence(q, site["fn"])
        else:
            log_q = q.log_density if is_delta else q.log_prob(site["value"])
            yield site, log_q - site["fn"].log_prob(site["value"])
    for name, site in samples(guide):
        if name not in model.nodes:  # auxiliary: a vector that other sites are cut from
            yield site, site["fn"].log_prob(site["value"])


def log_joint(
    model: Model, values: Values, batch: ClientBatch, params: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return log densities (C,) of local sites and rows at given values, and () of global sites."""
    with Substitute(params, batch):
        trace = poutine.trace(poutine.condition(model, data=values)).get_trace(batch)
    return sums_by_owner(
        ((site, site["fn"].log_prob(site["value"])) for _, site in samples(trace)), batch
    )


def divergence(q: Any, p: Any) -> Tensor:
    """Return KL(q || p) in closed form; for two Normals with one division, not torch's ten."""
    kinds = (dist.Independent, torch.distributions.Independent)
    if isinstance(q, kinds) and isinstance(p, kinds):
        count = q.reinterpreted_batch_ndims
        if count == p.reinterpreted_batch_ndims:
            inner = divergence(q.base_dist, p.base_dist)
            return inner.sum(tuple(range(-count, 0))) if count else inner
    if type(q) is dist.Normal and type(p) is dist.Normal:
        precision = p.scale.reciprocal()
        ratio, away = q.scale * precision, (q.loc - p.loc) * precision
        total: Tensor = 0.5 * (ratio * ratio + away * away - 1.0) - ratio.log()
        return total
    return kl_divergence(q, p)
