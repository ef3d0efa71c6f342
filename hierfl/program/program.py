"""A Pyro model and guide as pure functions of params and keys; what the clients plate holds is local."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pyro import poutine
from torch import Tensor
from torch.distributions.constraints import Constraint

from hierfl.core.arguments import NoSuchName, shown
from hierfl.core.process import unpickled
from hierfl.core.tables import Shown, printed
from hierfl.data.absent import Sites
from hierfl.data.batch import ClientBatch
from hierfl.program.handlers import Substitute, sites_until, traces_of
from hierfl.program.sites import Guide, Latents, LatentSite, Model, Values
from hierfl.program.traces import Center, Middle, Site, Terms, elbo_terms, scored
from hierfl.program.without_rows import of_all_sites, values_of

if TYPE_CHECKING:
    from hierfl.program.row_runs import Structure

Params = dict[str, Tensor]
T = TypeVar("T")


class ProgramError(ValueError):
    """A model or guide that cannot be run as written; the message names the site and the fix."""


def refuse_first(faults: Iterable[str]) -> None:
    """Refuse a program by the first of its faults, if it has any."""
    for fault in faults:
        raise ProgramError(fault)


_LEVELS = ("global", "local")


@dataclass(frozen=True, eq=False)
class ParamSpec:
    """A `pyro.param`; `axis` is the clients' dimension from the right, 0 if global; `start` is one client's."""

    name: str
    is_local: bool
    constraint: Constraint
    start: Tensor
    axis: int

    @property
    def size(self) -> int:
        """Number of unconstrained values: of one client, or in all for a global param."""
        return self.start.numel()


class Reads(NamedTuple):
    """The fields that a model and its guide read."""

    model: frozenset[str]
    guide: frozenset[str]


@unpickled("read it where it is needed, hierfl.read(model, guide, data)")
@printed
@dataclass(frozen=True, eq=False)
class Program:
    """A model and its guide, read and checked (`hierfl.read`).

    Args:
        model: the generative program.
        guide: the posterior family, covering every latent site of the model.
        latents: the model's latent sites.
        params: every param of model and guide.
        closed: sites whose KL may be taken in closed form.
        derived: `pyro.deterministic` site -> plates left of the clients; None for a global site.
        labels: observed site -> the field that it observes, as it is or transformed.
        factors: `pyro.factor` of the likelihood -> whether it has a value per row, else per client.
        supports: label field -> (its site, the values it can take).
        reads: the fields that model and guide read.
        num_clients: N.
        client_keys: (N, 2) int32, a noise key of each client, by its name.
        ranks: (N,) int64, the place of each client in the order of names.
        prototype: a few rows of one client, used wherever a value does not depend on rows.
        seed: of the run, for what a method draws.
        keyed: every draw is a function of its key under `torch.vmap`.
        mapped: model and guide can be computed under `torch.vmap`.
        unmapped_line: the user's line by which `torch.vmap` cannot carry draws, and the fix, or "".
        codes: field of integers, one or a few a row -> its least and its largest value.
        row_sites: the continuous sites of rows that were integrated out; None: there are none.
        reads_all_rows: the guide needs every row of a client at each step.
        joint: observed site with one density for all rows -> whether its event is the rows.
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
    client_keys: Tensor
    ranks: Tensor
    prototype: ClientBatch
    seed: int = 0
    keyed: bool = True
    reads_all_rows: bool = False
    joint: Mapping[str, bool] = field(default_factory=dict)
    factors: Mapping[str, bool] = field(default_factory=dict)
    mapped: bool = True
    unmapped_line: str = ""
    codes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    row_sites: Structure | None = None

    def __tables__(self) -> Shown:
        import pandas as pd  # slow to import

        def row(kind: str, spec: LatentSite | ParamSpec) -> tuple[Any, ...]:
            shape = tuple(spec.start.shape)
            return spec.name, kind, _LEVELS[spec.is_local], shape, spec.size

        sites = [row("latent", site) for site in self.latents.sites]
        for name, plates in self.derived.items():
            sites.append((name, "deterministic", _LEVELS[plates is not None], "", ""))
        sites += [row("param", spec) for spec in self.params]
        sites += [(name, "observed", "", "", "") for name in self.labels]
        frame = pd.DataFrame(sites, columns=["name", "kind", "level", "shape", "numbers"])
        model = getattr(self.model, "__name__", type(self.model).__name__)
        return Shown(f"Program of '{model}', {self.num_clients} clients", frame)

    @property
    def in_vmap(self) -> bool:
        """Whether several clients, and several draws, can be carried at once under `torch.vmap`."""
        return self.keyed and self.mapped

    @property
    def share(self) -> float:
        """1 / N, a client's share of the global terms."""
        return 1.0 / self.num_clients

    def start(self) -> tuple[Params, Params]:
        """Return the unconstrained starting values: (global params, local params of one client)."""
        shared: Params = {}
        own: Params = {}
        for spec in self.params:
            (own if spec.is_local else shared)[spec.name] = spec.start.clone()
        return shared, own

    def terms(
        self, params: Params, batch: ClientBatch, *, support: ClientBatch | None = None
    ) -> Terms:
        """Estimate the parts of the negative ELBO at one draw, a function of the batch's keys."""
        support = batch if support is None else support
        guided, modeled = traces_of(self.model, self.guide, params, batch, support)
        return elbo_terms(guided, modeled, batch, closed=self.closed, factors=self.factors)

    def loss(self, params: Params, batch: ClientBatch) -> Tensor:
        """Return the batch's part of the pooled negative ELBO, (), at one draw."""
        return self.terms(params, batch).loss(self.share).sum()

    def draw_with_terms(self, params: Params, batch: ClientBatch) -> tuple[Values, Terms]:
        """Draw every latent and deterministic site, with the terms: minus their sum is the log weight."""
        # a likelihood averaged over q would not be the density at the draw: the model does not receive q
        guided, modeled = traces_of(self.model, self.guide, params, batch, batch)
        names = [*(site.name for site in self.latents.sites), *self.derived]
        values = {name: modeled.nodes[name]["value"] for name in names}
        return values, elbo_terms(guided, modeled, batch, closed=(), factors=self.factors)

    def mean_loss(self, params: Params, batch: ClientBatch, *, weight: float = 0.0) -> Tensor:
        """Return sum_k (nll_k / N_k + weight * local_kl_k) over the batch's clients, ()."""
        terms = self.terms(params, batch)
        nll = terms.nll / batch.counts
        # 0.0 * x is not dropped by a compiler: leave the term out
        return (nll + weight * terms.local_kl if weight else nll).sum()

    def priors(
        self, params: Params, given: Values | None = None, *, batch: ClientBatch | None = None
    ) -> dict[str, Any]:
        """Return the prior of each local site, at given params and values of the global sites."""
        batch = self.prototype if batch is None else batch
        by_mean = Center({site.name: site.has_mean for site in self.latents.sites})
        model = poutine.condition(self.model, data=given) if given else self.model
        own = {spec.name: spec.start for spec in self.params if spec.is_local}
        names = [site.name for site in self.latents.local_block.sites]
        with Substitute({**own, **params}, batch), by_mean:
            nodes = sites_until(lambda: model(batch), names)
        return {name: nodes[name]["fn"] for name in names}

    def draw(self, params: Params, batch: ClientBatch) -> Values:
        """Draw every latent site from the guide once, by the batch's keys."""
        with Substitute(params, batch):
            nodes: dict[str, Site] = poutine.trace(self.guide).get_trace(batch).nodes
        return values_of(nodes, (site.name for site in self.latents.sites))

    def middle(self, params: Params, batch: ClientBatch) -> Values:
        """Return the middle of the guide's posterior of each latent site."""
        with Substitute(params, batch), Middle():
            nodes: dict[str, Site] = poutine.trace(self.guide).get_trace(batch).nodes
        return {site.name: nodes[site.name]["value"] for site in self.latents.sites}

    def draw_all(self, params: Params, own: ClientBatch, asked: ClientBatch) -> Values:
        """Draw every latent site by a client's `own` rows, and the deterministic ones of `asked`."""
        values = self.draw(params, own)
        derived = self.derive(values, params, asked)
        sites = {**values, **derived}
        return Sites(sites) if Sites in (type(values), type(derived)) else sites

    def derive(self, values: Values, params: Params, batch: ClientBatch) -> Values:
        """Return the model's deterministic sites at given values of its latent sites."""
        if not self.derived:
            return {}
        latents = of_all_sites(values, self.latents, self.model)
        with Substitute(params, batch, reparameterized=False), poutine.condition(data=latents):
            nodes = sites_until(lambda: self.model(batch), self.derived)
        return values_of(nodes, self.derived)

    def observed(
        self, values: Values, batch: ClientBatch, params: Params
    ) -> dict[str, tuple[Any, Tensor]]:
        """Return each observed site's distribution given the latent sites, and its value."""
        nodes = self.conditioned(values, params, batch)
        return {name: (nodes[name]["fn"], nodes[name]["value"]) for name in self.labels}

    def log_likelihoods(self, values: Values, batch: ClientBatch, params: Params) -> Values:
        """Return each likelihood term's log density given the latent sites, as it counts."""
        nodes = self.conditioned(values, params, batch)
        return {
            name: scored(nodes[name], nodes[name]["fn"].log_prob(nodes[name]["value"]))
            for name in (*self.labels, *self.factors)
        }

    def conditioned(self, values: Values, params: Params, batch: ClientBatch) -> dict[str, Site]:
        """Return the trace's nodes given latent sites."""
        values = of_all_sites(values, self.latents, self.model)
        with Substitute(params, batch, reparameterized=False):
            nodes: dict[str, Site] = (
                poutine.trace(poutine.condition(self.model, data=values)).get_trace(batch).nodes
            )
        return nodes

    @property
    def sites_of_rows(self) -> tuple[str, ...]:
        """The observed sites that have one value per row, and a density of each."""
        return tuple(
            site
            for site, label in self.labels.items()
            if label in self.prototype.fields and site not in self.joint
        )

    @property
    def terms_of_rows(self) -> tuple[str, ...]:
        """The likelihood terms that have one value per row: observed sites and factors."""
        return (*self.sites_of_rows, *(name for name, of_rows in self.factors.items() if of_rows))

    def observed_site(self, name: str | None) -> str:
        """Return the name of an observed site with a value per row; None stands for the only one."""
        if name is not None and not isinstance(name, str):
            raise TypeError(f"site is {shown(name)}: it must be the name of an observed site")
        of_rows = self.sites_of_rows
        joint = next((site for site in self.joint if name in (None, site)), None)
        if joint is not None and (name is not None or not of_rows):
            raise ValueError(
                f"site '{joint}' has one density for all rows of a client, and none for each row: "
                "use fit.posterior_predictive or loo(fit, 'client'), or give the model a density "
                "of each row"
            )
        if name in self.factors or (name is None and not of_rows and self.factors):
            raise ValueError(
                f"'{name or next(iter(self.factors))}' is a pyro.factor, or observes a value "
                "computed from several fields, so that it has no label to predict or draw: observe "
                "one field, pyro.sample(name, distribution, obs=batch.y)"
            )
        sites = ", ".join(f"'{site}'" for site in of_rows) or "none"
        if name is None and len(of_rows) != 1:
            raise ValueError(
                f"the sites that the model observes per row are {sites}: say which to predict, site="
            )
        if name is not None and name not in of_rows:
            raise NoSuchName(f"the model observes no site '{name}' per row; it observes {sites}")
        return name or of_rows[0]


def once_a_program(recognize: Callable[[Program], T]) -> Callable[[Program], T]:
    """Wrap a function of a program so that the program keeps its result."""

    @wraps(recognize)
    def kept(program: Program) -> T:
        results: dict[Any, Any] = program.__dict__.setdefault("_found", {})
        if recognize not in results:
            results[recognize] = recognize(program)
        result: T = results[recognize]
        return result

    return kept


def stacked(program: Program, rows: Params) -> Params:
    """Return local params (N, *shape) as a program with N clients in its plate reads them."""
    axes = {spec.name: spec.axis for spec in program.params}
    return {n: value.squeeze(axes[n]).movedim(0, axes[n]) for n, value in rows.items()}
