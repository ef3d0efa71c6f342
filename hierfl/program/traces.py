"""Sites of a Pyro trace and the terms of the ELBO that they add up to; latent sites at the centers of their priors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import biject_to, kl_divergence
from torch.distributions.transforms import AffineTransform, ComposeTransform, IndependentTransform

from hierfl.data.batch import CLIENTS, DATA, ClientBatch

NEAR = 4.0  # log2 of the scale of a prior up to which its unit is 1
WRAPPERS = (torch.distributions.Independent, dist.ExpandedDistribution, dist.FoldedDistribution)
NAN_MASKED = (dist.NanMaskedNormal, dist.NanMaskedMultivariateNormal)
NORMAL = (torch.distributions.Normal, torch.distributions.MultivariateNormal)
POINTWISE = (torch.distributions.MultivariateNormal, torch.distributions.Exponential)
SCALED = (
    *NORMAL,
    torch.distributions.StudentT,
    torch.distributions.Laplace,
    torch.distributions.Cauchy,
    torch.distributions.HalfNormal,
    torch.distributions.HalfCauchy,
    torch.distributions.Exponential,
)

Site = Any  # a node of a Pyro trace, or the message of a handler: a dict
NAME = attrgetter("name")


def in_clients(site: Site) -> bool:
    """Return whether a site is inside the clients plate, and so local."""
    return CLIENTS in map(NAME, site["cond_indep_stack"])


def in_data(site: Site) -> bool:
    """Return whether a site is inside the data plate, and so has one value per row."""
    return DATA in map(NAME, site["cond_indep_stack"])


def is_latent(site: Site) -> bool:
    """Return whether a site is a latent variable; the index of a plate is not."""
    return (
        site["type"] == "sample"
        and not site["is_observed"]
        and not isinstance(site["fn"], _Subsample)
    )


def is_enumerable(site: Site) -> bool:
    """Return whether a latent site is discrete with finite support: a number or a vector."""
    fn = site["fn"]
    return is_latent(site) and getattr(fn, "has_enumerate_support", False) and fn.event_dim < 2


def is_deterministic(site: Site) -> bool:
    """Return whether a site is a `pyro.deterministic`, a computed, named value, or what a reparam leaves."""
    if site["type"] != "sample" or site["infer"].get("_deterministic"):
        return site["type"] == "sample"
    fn = site["fn"]
    is_masked = isinstance(fn, dist.MaskedDistribution) and fn._mask is False
    return is_masked and site["is_observed"] and isinstance(fn.base_dist, dist.Delta)


def connected(sets: Mapping[str, set[str]]) -> list[tuple[list[str], set[str]]]:
    """Return groups of names whose sets share an element, directly or by others, and their unions."""
    groups: list[tuple[list[str], set[str]]] = []
    for name, own in sets.items():
        touching = [group for group in groups if group[1] & own]
        groups = [group for group in groups if not group[1] & own]
        names = [*(n for group in touching for n in group[0]), name]
        groups.append((names, own.union(*(group[1] for group in touching))))
    return groups


def is_factor(site: Site) -> bool:
    """Return whether a site is a `pyro.factor`."""
    return isinstance(getattr(site["fn"], "base_dist", site["fn"]), dist.Unit)


def is_likelihood(site: Site, factors: Container[str] = ()) -> bool:
    """Return whether a site is observed inside the clients plate."""
    counts = not is_factor(site) or site["name"] in factors
    return site["is_observed"] and in_clients(site) and counts


def samples(trace: Any) -> Iterator[tuple[str, Site]]:
    """Yield name and site of every sample statement of a trace but plates' indices."""
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and not isinstance(site["fn"], _Subsample):
            yield name, site


def scored(site: Site, term: Tensor) -> Tensor:
    """Return a site's term, scaled and masked as its plates say."""
    counted: Tensor = scale_and_mask(term, site["scale"], site["mask"])
    return counted


def leaves_nan_out(fn: Any) -> bool:
    """Return whether a distribution itself leaves out what is missing."""
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    return isinstance(fn, NAN_MASKED)


def counts_of(site: Site) -> tuple[Any, Tensor | None]:
    """Return an observed site's distribution without masks, and how often labels count; None: once."""
    fn, mask = site["fn"], site["mask"]
    while hasattr(fn, "_mask"):  # of dist.mask
        own = torch.as_tensor(fn._mask)
        mask, fn = own if mask is None else own & mask, fn.base_dist
    if leaves_nan_out(fn):
        own = site["value"].isfinite()
        own = own.any(-1) if fn.event_dim else own
        mask = own if mask is None else own & mask
    if mask is None and isinstance(site["scale"], float | int) and site["scale"] == 1:
        return fn, None
    return fn, scored({"scale": site["scale"], "mask": mask}, torch.ones(fn.batch_shape))


def observe_others(site: Site, other: Site) -> bool:
    """Return whether two observed sites have other values where both count: elsewhere one may be filled."""
    value, before = torch.as_tensor(site["value"]), torch.as_tensor(other["value"])
    if value.shape != before.shape:
        return True
    differ = value != before
    for fn, counts in map(counts_of, (site, other)):
        if counts is not None:
            differ = differ & (counts > 0.0)[(..., *[None] * fn.event_dim)]
    return bool(differ.any())


def per_client(term: Tensor) -> Tensor:
    """Sum a term (..., C, B) over all dimensions but that of the clients: (C,)."""
    return term.sum([*range(term.dim() - 2), -1])


def sums_by_owner(
    terms: Iterable[tuple[Site, Tensor]], batch: ClientBatch
) -> tuple[Tensor, Tensor]:
    """Add up scaled and masked terms: (C,) of local sites, a client each, and () of global ones."""
    device = batch.counts.device
    own, shared = torch.zeros(batch.num_clients, device=device), torch.zeros((), device=device)
    for site, term in terms:
        if in_clients(site):
            own = own + per_client(scored(site, term))
        else:
            shared = shared + scored(site, term).sum()
    return own, shared


def with_one_changed(
    model: Callable[[ClientBatch], Any],
    batch: ClientBatch,
    at: Callable[[], Messenger] | None = None,
) -> Iterator[tuple[str, dict[str, Site]]]:
    """Yield each field of rows, and a model's sites, at centers or set by `at`, with it changed, unless it fails."""
    for name, field in batch.fields.items():
        others = [~field if field.dtype == torch.bool else field + 1]
        if not field.is_floating_point() and field.dtype != torch.bool:
            others.append(field.amax() + field.amin() - field)  # within the range of codes
        for other in others:
            changed = replace(batch, fields={**batch.fields, name: other})
            with (at or Center)(), pyro.validation_enabled(False):
                try:
                    trace: Any = poutine.trace(model).get_trace(changed)
                except (RuntimeError, ValueError, IndexError):
                    continue
            yield name, trace.nodes
            break


def has_mean(fn: Any) -> bool:
    """Return whether a distribution has a finite mean inside its support."""
    try:
        return bool(fn.mean.isfinite().all()) and bool(fn.support.check(fn.mean).all())
    except (NotImplementedError, AttributeError):
        return False


def unit_of(fn: Any) -> Tensor | None:
    """Return the scale of a prior as a power of 2, 1 if near 1; None for a Gamma or Dirichlet, say."""
    shape = fn.shape()
    while isinstance(fn, WRAPPERS):
        fn = fn.base_dist
    if not isinstance(fn, SCALED):
        return None
    scale: Tensor = fn.stddev if isinstance(fn, POINTWISE) else fn.scale
    log = scale.detach().expand(shape).log2()
    return torch.where(log.isfinite() & (log.abs() > NEAR), log.round(), 0.0).exp2()


class AtSites(Messenger):
    """Lets a function change each sample statement's message before, or `after`, its value is drawn."""

    def __init__(self, change: Callable[[Site], None], *, after: bool = False) -> None:
        super().__init__()
        setattr(self, "_pyro_post_sample" if after else "_pyro_sample", change)


class Center(Messenger):
    """Sets latent sites to their priors' centers given earlier ones; `by_mean` avoids reading values."""

    def __init__(self, by_mean: Mapping[str, bool] | None = None) -> None:
        super().__init__()
        self.by_mean = by_mean or {}

    def _pyro_sample(self, msg: Site) -> None:
        if msg["done"] or msg["is_observed"] or isinstance(msg["fn"], _Subsample):
            return
        fn, start, by_mean = msg["fn"], msg["infer"].get("start"), self.by_mean.get(msg["name"])
        if start is not None:  # a program may set where a site starts, such as a network's weights
            value = torch.as_tensor(start).expand(fn.shape())
        elif has_mean(fn) if by_mean is None else by_mean:
            value = fn.mean.expand(fn.shape())
        else:
            shape, transform = fn.shape(), biject_to(fn.support)
            transforms = [transform]
            while transforms:
                match transforms.pop():
                    case ComposeTransform(parts=more):
                        transforms += more
                    case IndependentTransform(base_transform=base):
                        transforms.append(base)
                    case AffineTransform():  # keeps the shape, and would import sympy, 0.5 s
                        pass
                    case part:
                        shape = part.inverse_shape(shape)
            value = transform(torch.zeros(shape))
            unit = unit_of(fn)
            value = value if unit is None else value * unit
        msg["value"], msg["done"] = value, True


def center(fn: Any, by_mean: bool | None = None) -> Tensor:
    """Return what `Center` sets a site of a distribution to, of shape `fn.shape()`."""
    site: Site = {"name": "", "fn": fn, "infer": {}, "done": False, "is_observed": False}
    Center({} if by_mean is None else {"": by_mean})._pyro_sample(site)
    value: Tensor = site["value"]
    return value


class Near(Messenger):
    """Moves latent sites, or global ones, off their centers, by a part of a unit of the real line."""

    def __init__(self, away: float, seed: int, *, global_sites: bool = False) -> None:
        super().__init__()
        self.away, self.generator = away, torch.Generator().manual_seed(seed)
        self.global_sites = global_sites

    def _pyro_sample(self, msg: Site) -> None:
        if self.global_sites and in_clients(msg):
            return
        if is_latent(msg) and not msg["done"] and not is_enumerable(msg):
            transform = biject_to(msg["fn"].support)
            free = transform.inv(center(msg["fn"]))
            noise = torch.randn(free.shape, generator=self.generator)
            msg["value"], msg["done"] = transform(free + self.away * noise.to(free)), True


class Middle(Messenger):
    """Sets latent sites to the middle of their distributions: the mean, or the image of the base's."""

    def _pyro_sample(self, msg: Site) -> None:
        if not (msg["done"] or msg["is_observed"] or isinstance(msg["fn"], _Subsample)):
            msg["value"], msg["done"] = middle(msg["fn"]), True


def middle(fn: Any) -> Tensor:
    """Return the mean of a distribution, or the image of its base's, of shape `fn.shape()`."""
    if isinstance(fn, torch.distributions.Independent):
        return middle(fn.base_dist)
    if isinstance(fn, torch.distributions.TransformedDistribution):
        value = middle(fn.base_dist)
        for transform in fn.transforms:
            value = transform(value)
        return value
    mean: Tensor = fn.mean
    return mean.expand(fn.shape())


class Terms(NamedTuple):
    """One estimate of the negative ELBO in nats: `nll` and `local_kl` (C,) by client, and `global_kl` ()."""

    nll: Tensor
    local_kl: Tensor
    global_kl: Tensor

    def loss(self, share: float) -> Tensor:
        """Return each client's part of the negative ELBO, (C,): `share`, 1 / N, of `global_kl`."""
        return self.nll + self.local_kl + share * self.global_kl


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
