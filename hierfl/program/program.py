"""A Pyro model and guide as pure functions of named tensors.

The clients plate is the boundary: a site or param whose `cond_indep_stack` holds it is local, every other one is global. Nothing
is read from, or left in, Pyro's param store or torch's generator: params are answered from a dict, draws from the batch's keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import kl_divergence, transform_to
from torch.distributions.constraints import Constraint

from hierfl.core import noise
from hierfl.data.batch import CLIENTS, ClientBatch
from hierfl.program.keyed_draws import Noise, NoKeyedDraw, draw, seeded
from hierfl.program.prior_centre import Centre
from hierfl.program.sites import Guide, Latents, Model, Values

Params = dict[str, Tensor]
Site = Any  # a message of a Pyro trace: a dict of what its site is


class ProgramError(ValueError):
    """A model or guide that cannot be run federatedly as it is written; the message names the site and the mend."""


def in_clients(site: Site) -> bool:
    """Whether a site stands inside the clients plate."""
    return any(frame.name == CLIENTS for frame in site["cond_indep_stack"])


def is_latent(site: Site) -> bool:
    """Whether a site of a trace is a latent variable (and no plate's own index)."""
    return (
        site["type"] == "sample"
        and not site["is_observed"]
        and not isinstance(site["fn"], _Subsample)
    )


def is_deterministic(site: Site) -> bool:
    """Whether a site is a `pyro.deterministic`: a value that is computed, and recorded by name."""
    return site["type"] == "sample" and bool(site["infer"].get("_deterministic"))


class Answer(Messenger):
    """Answers every `pyro.param` from a dict of unconstrained values, and every draw with noise made of the batch's keys."""

    def __init__(self, params: Mapping[str, Tensor], batch: ClientBatch) -> None:
        super().__init__()
        self.params, self.batch = params, batch

    def _pyro_param(self, msg: Site) -> None:
        if msg["name"] in self.params:
            constraint = msg["kwargs"].get("constraint", dist.constraints.real)
            free = self.params[msg["name"]]
            msg["value"] = (
                free if constraint is dist.constraints.real else transform_to(constraint)(free)
            )
            msg["done"] = True

    def _pyro_sample(self, msg: Site) -> None:
        if msg["done"] or msg["is_observed"] or isinstance(msg["fn"], _Subsample):
            return
        if isinstance(
            msg["fn"], dist.Delta
        ):  # needs no key, and keys are a fair part of a small eager step
            msg["value"], msg["done"] = msg["fn"].v, True
            return
        local = in_clients(msg)
        key = noise.fold(
            self.batch.key if local else self.batch.shared_key, noise.word(msg["name"])
        )
        try:
            msg["value"] = draw(msg["fn"], Noise(key, axis=len(msg["fn"].batch_shape) - 2))
        except NoKeyedDraw:
            msg["value"] = seeded(msg["fn"], key)
        msg["done"] = True


class Terms(NamedTuple):
    """The parts of one negative ELBO estimate; their sum over clients, `global_kl` counted once, is the pooled program's.

    nll: (C,) minus the log-likelihood of each client's rows, a mini-batch scaled to all of them, in nats.
    local_kl: (C,) KL(q || p) of each client's own sites.
    global_kl: () KL(q || p) of the global sites.
    """

    nll: Tensor
    local_kl: Tensor
    global_kl: Tensor

    def loss(self, share: float) -> Tensor:
        """A client's part of the pooled negative ELBO, (C,), with `share` = 1 / N of the global KL."""
        return self.nll + self.local_kl + share * self.global_kl


@dataclass(frozen=True, eq=False)
class ParamSpec:
    """A `pyro.param` of a program: whose it is, where it starts (unconstrained), where the clients stand in its shape."""

    name: str
    is_local: bool
    constraint: Constraint
    start: Tensor
    axis: int


class Reads(NamedTuple):
    """The fields that a model and its guide read."""

    model: frozenset[str]
    guide: frozenset[str]


@dataclass(frozen=True, eq=False)
class Program:
    """A model and its guide, read and checked (`hierfl.program.read.read`).

    Args:
        model: the generative program.
        guide: the posterior family, covering every latent site of the model.
        latents: the model's latent sites.
        params: every param of both.
        closed: sites whose KL has a closed form that may be used: drawn in the same order in model and guide.
        derived: `pyro.deterministic` sites -> their plates left of the clients, None for a global one.
        labels: observed site -> the field of data that it observes, as it is or changed.
        supports: label field -> (its site, the values it can take).
        reads: the fields that model and guide read.
        num_clients: N.
        prototype: a few rows of one client, that stand for any where a value does not depend on rows.
        keyed: every draw is a function of its key under `torch.vmap`; else clients are run one at a time.
        reads_all_rows: the guide needs every row of a client at each step.
    """

    model: Model
    guide: Guide
    latents: Latents
    params: tuple[ParamSpec, ...]
    closed: frozenset[str]
    derived: Mapping[str, int | None]
    labels: Mapping[str, str]
    supports: Mapping[str, tuple[str, Constraint]]
    reads: Reads
    num_clients: int
    prototype: ClientBatch
    keyed: bool = True
    reads_all_rows: bool = False

    @property
    def share(self) -> float:
        """1 / N: a client's part of what the clients have in common."""
        return 1.0 / self.num_clients

    def start(self) -> tuple[Params, Params]:
        """First values, unconstrained: (global params, one client's own params)."""
        values = {spec.name: spec.start.clone() for spec in self.params}
        local = {spec.name for spec in self.params if spec.is_local}
        return (
            {k: v for k, v in values.items() if k not in local},
            {k: v for k, v in values.items() if k in local},
        )

    def terms(
        self, params: Params, batch: ClientBatch, *, support: ClientBatch | None = None
    ) -> Terms:
        """One estimate of the negative ELBO's parts, its noise a function of the batch's keys.

        Args:
            params: of model and guide.
            batch: the rows that are scored.
            support: other rows of the same clients, that the guide reads; None: those that are scored.
        """
        return self._terms(
            *self._traces(params, batch, batch if support is None else support), batch
        )

    def weighed(self, params: Params, batch: ClientBatch) -> tuple[Values, Terms]:
        """One draw of every latent and deterministic site, and its terms at that draw, of which none is a mean in closed form.

        Minus their sum is log p(draw, rows) - log q(draw): the log of the weight that makes the guide's draws the posterior's.
        """
        guide, model = self._traces(
            params, batch, batch, tell=False
        )  # a likelihood that is a mean over q would be no density
        names = [*(site.name for site in self.latents.sites), *self.derived]
        at_draw = replace(self, closed=frozenset())
        return {name: model.nodes[name]["value"] for name in names}, at_draw._terms(
            guide, model, batch
        )

    def _traces(
        self, params: Params, batch: ClientBatch, support: ClientBatch, *, tell: bool = True
    ) -> tuple[Any, Any]:
        with Answer(params, batch):
            guide = poutine.trace(self.guide).get_trace(support)
            told = _POSTERIOR.set(
                {name: site["fn"] for name, site in samples(guide)} if tell else None
            )
            try:
                model = poutine.trace(poutine.replay(self.model, guide)).get_trace(batch)
            finally:
                _POSTERIOR.reset(told)
        return guide, model

    def _terms(self, guide: Any, model: Any, batch: ClientBatch) -> Terms:
        total = Terms(
            *(
                torch.zeros(n, device=batch.counts.device)
                for n in (batch.num_clients, batch.num_clients, 1)
            )
        )
        nll, local_kl, global_kl = total.nll, total.local_kl, total.global_kl.squeeze(0)
        for name, site in samples(model):
            if site["is_observed"] and in_clients(site) and not _is_factor(site):
                nll = nll - per_client(scored(site, site["fn"].log_prob(site["value"])))
                continue
            of = guide.nodes.get(name)
            term = scored(site, self._kl(site, of))
            if in_clients(site):
                local_kl = local_kl + per_client(term)
            else:
                global_kl = global_kl + term.sum()
        for name, site in samples(guide):
            if name not in model.nodes:  # auxiliary: a vector that other sites are cut from
                term = scored(site, site["fn"].log_prob(site["value"]))
                if in_clients(site):
                    local_kl = local_kl + per_client(term)
                else:
                    global_kl = global_kl + term.sum()
        return Terms(nll, local_kl, global_kl)

    def _kl(self, site: Site, of: Site | None) -> Tensor:
        """Log q - log p at the draw, or KL(q || p) given the sites before it, where both sides allow it."""
        if of is None:  # a factor, or a global observation
            minus: Tensor = -site["fn"].log_prob(site["value"])
            return minus
        if isinstance(of["fn"], dist.Delta):
            density: Tensor = of["fn"].log_density - site["fn"].log_prob(site["value"])
            return density
        if site["name"] in self.closed:
            return divergence(of["fn"], site["fn"])
        difference: Tensor = of["fn"].log_prob(site["value"]) - site["fn"].log_prob(site["value"])
        return difference

    def mean_loss(self, params: Params, batch: ClientBatch, *, weight: float = 0.0) -> Tensor:
        """Mean negative log likelihood of a row + weight * KL of the client's own sites, summed over the batch's clients, ()."""
        terms = self.terms(params, batch)
        nll = terms.nll / batch.counts
        # 0.0 * x is not dropped by a compiler: leave the term out
        return (nll + weight * terms.local_kl if weight else nll).sum()

    def priors(self, params: Params) -> dict[str, Any]:
        """The prior of each local site given the global params and the middle of the global sites: name -> distribution."""
        by_mean = Centre({site.name: site.has_mean for site in self.latents.sites})
        with Answer(params, self.prototype), by_mean:
            trace = poutine.trace(self.model).get_trace(self.prototype)
        return {site.name: trace.nodes[site.name]["fn"] for site in self.latents.local_block.sites}

    def draw(self, params: Params, batch: ClientBatch) -> Values:
        """One draw of every latent site from the guide, by the batch's keys."""
        with Answer(params, batch):
            nodes: dict[str, Site] = poutine.trace(self.guide).get_trace(batch).nodes
        return {site.name: nodes[site.name]["value"] for site in self.latents.sites}

    def derive(self, values: Values, params: Params, batch: ClientBatch) -> Values:
        """The model's deterministic sites at given latent ones."""
        if not self.derived:
            return {}
        with Answer(params, batch):
            nodes: dict[str, Site] = (
                poutine.trace(poutine.condition(self.model, data=values)).get_trace(batch).nodes
            )
        return {name: nodes[name]["value"] for name in self.derived}

    def observed(
        self, values: Values, batch: ClientBatch, params: Params
    ) -> dict[str, tuple[Any, Tensor]]:
        """Observed site -> (its distribution given the latent ones, what it observes); a latent site not given is drawn."""
        with Answer(params, batch):
            nodes: dict[str, Site] = (
                poutine.trace(poutine.condition(self.model, data=values)).get_trace(batch).nodes
            )
        return {name: (nodes[name]["fn"], nodes[name]["value"]) for name in self.labels}

    @property
    def sites_of_rows(self) -> tuple[str, ...]:
        """The observed sites that have one value a row."""
        return tuple(site for site, label in self.labels.items() if label in self.prototype.fields)

    def observed_site(self, name: str | None) -> str:
        """The observed site of a name; None: the only one.

        Raises:
            KeyError: there is none of that name.
            ValueError: there are several, and none is named.
        """
        of_rows = self.sites_of_rows
        sites = ", ".join(f"'{site}'" for site in of_rows) or "none"
        if name is None and len(of_rows) != 1:
            raise ValueError(
                f"the sites that the model observes a row are {sites}: say which to predict, site="
            )
        if name is not None and name not in of_rows:
            raise KeyError(f"the model observes no site '{name}' a row; those it does are {sites}")
        return name or of_rows[0]


def log_joint(
    model: Model, values: Values, batch: ClientBatch, params: Params
) -> tuple[Tensor, Tensor]:
    """Log density of a model at given values: ((C,) each client's own sites and rows given the global sites, () the latter)."""
    with Answer(params, batch):
        trace = poutine.trace(poutine.condition(model, data=values)).get_trace(batch)
    own, shared = (
        torch.zeros(batch.num_clients, device=batch.counts.device),
        torch.zeros((), device=batch.counts.device),
    )
    for _, site in samples(trace):
        term = scored(site, site["fn"].log_prob(site["value"]))
        if in_clients(site):
            own = own + per_client(term)
        else:
            shared = shared + term.sum()
    return own, shared


def samples(trace: Any) -> Iterator[tuple[str, Site]]:
    """Name and site of every sample statement of a trace, observed or not, plates' own indices left out."""
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and not isinstance(site["fn"], _Subsample):
            yield name, site


_POSTERIOR: ContextVar[Mapping[str, Any] | None] = ContextVar("posterior", default=None)


def posterior_of(site: str) -> Any:
    """The guide's distribution of a site, for a model that is being asked for an estimate of the ELBO; None at all other times.

    With it a model may take the expectation of its likelihood in another way than at the draw it is handed, without bias.
    """
    return (_POSTERIOR.get() or {}).get(site)


def divergence(q: Any, p: Any) -> Tensor:
    """KL(q || p) in closed form. That of two Normals, of every weight of a mean-field network, with one division for torch's ten."""
    both = (dist.Independent, torch.distributions.Independent)
    if (
        isinstance(q, both)
        and isinstance(p, both)
        and q.reinterpreted_batch_ndims == p.reinterpreted_batch_ndims
    ):
        apart = divergence(q.base_dist, p.base_dist)
        return (
            apart.sum(tuple(range(-q.reinterpreted_batch_ndims, 0)))
            if q.reinterpreted_batch_ndims
            else apart
        )
    if type(q) is dist.Normal and type(p) is dist.Normal:
        precision = p.scale.reciprocal()
        ratio, away = q.scale * precision, (q.loc - p.loc) * precision
        found: Tensor = 0.5 * (ratio * ratio + away * away - 1.0) - ratio.log()
        return found
    found = kl_divergence(q, p)
    return found


def _is_factor(site: Site) -> bool:
    return isinstance(getattr(site["fn"], "base_dist", site["fn"]), dist.Unit)


def scored(site: Site, term: Tensor) -> Tensor:
    """A term of a site, scaled and masked as its plates say."""
    counted: Tensor = scale_and_mask(term, site["scale"], site["mask"])
    return counted


def per_client(term: Tensor) -> Tensor:
    """Sum (..., C, B) over all but the clients: (C,)."""
    return term.sum([d for d in range(term.dim()) if d != term.dim() - 2])


@contextmanager
def untouched_store() -> Iterator[None]:
    """Pyro's param store and torch's generator, as they were before."""
    with pyro.get_param_store().scope(), torch.random.fork_rng(devices=[]):
        yield
