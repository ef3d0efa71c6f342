"""Discrete latent sites, summed out of a program before anything else reads it.

    p(y | z) = sum_k p(k | z) p(y | k, z),    z the continuous sites, k the discrete ones

Sites with finite support are enumerated in dimensions left of all plates, as Pyro's `EnumMessenger`
does it, also in `pyro.markov` loops. What comes out of `summed_out` has continuous sites alone:

* The only site that depends on some labels, in the same plates as they, keeps its name and has the
  mixture of its distributions. It can be scored, drawn and predicted.
* Other components, such as a hidden Markov chain, or a kind of client that many rows depend on,
  become one `pyro.factor`, by row or by client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import opt_einsum
import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from hierfl.core.process import set_to
from hierfl.data.batch import CLIENTS, DATA, ClientBatch
from hierfl.program.elimination import Component, Tables, batch_shape_of, plates_of
from hierfl.program.global_labels import GlobalLabels, global_labels, plain_trace, reach_clients
from hierfl.program.mixture import Mixture, expanded, noting_parameters, unexpanded
from hierfl.program.program import Params, Program, ProgramError, refuse_first
from hierfl.program.sites import Model, Values
from hierfl.program.traces import (
    Center,
    Site,
    connected,
    in_clients,
    in_data,
    is_deterministic,
    is_enumerable,
    is_factor,
    is_latent,
    samples,
)
from hierfl.program.wrapped import add_factor

LARGEST = 1 << 20  # entries of a table that an elimination needs, for each client or row
TINY = 1e-30  # rate of a Poisson that a label sets to 0
# where a run of a program leaves the tables of its discrete sites, in place of adding their sums
_TABLES: ContextVar[list[Tables] | None] = ContextVar("tables", default=None)


class _Counts(dist.Poisson):
    """A Poisson whose rate a label may set to 0, where the slope of torch's density is no number."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density; the rate's logarithm is taken once, however many values it has."""
        return value * self.rate.clamp(min=TINY).log() - self.rate - (value + 1).lgamma()


class _Enumerated(EnumMessenger):
    """Enumerates discrete sites, and hides them and what depends on them from the handlers outside.

    `sites` holds what is hidden. Without components, all sites are kept and none is hidden.
    """

    def __init__(
        self, nesting: int, components: Sequence[Component] | None, batch: ClientBatch
    ) -> None:
        super().__init__(first_available_dim=-1 - nesting)
        self.nesting, self.sites, self.batch = nesting, Trace(), batch
        self.discovers = components is None
        whole = components or ()
        self.mixtures = {c.terms[0]: c for c in whole if c.is_mixture}
        self.factors = {name for c in whole if not c.is_mixture for name in c.terms}
        self.mixed = {c.mixed: c for c in whole if c.mixed}
        self.priors: dict[
            str, Tensor
        ] = {}  # log densities of `mixed` sites, as outer handlers see them

    def _pyro_sample(self, msg: Site) -> None:
        name = msg["name"]
        if is_enumerable(msg) and not msg["done"]:
            msg["infer"] = {**msg["infer"], "enumerate": "parallel"}
            msg["stop"] = True
        super()._pyro_sample(msg)
        component = self.mixtures.get(name) or self.mixed.get(name)
        if isinstance(msg["fn"], dist.Poisson) and (component or name in self.factors):
            counts: Any = _Counts(unexpanded(msg["fn"]).rate, validate_args=False)  # type: ignore[no-untyped-call]
            msg["fn"] = expanded(counts, msg["fn"].batch_shape)
        if component is not None:
            labels: Any = [self.sites.nodes[label] for label in component.labels]
            weights = [unexpanded(site["fn"]).log_prob(site["value"]) for site in labels]
            total: Tensor = sum(weights[1:], weights[0])
            msg["fn"] = Mixture(msg["fn"], total, len(batch_shape_of(msg)))
        elif name in self.factors:
            msg["stop"] = not is_latent(msg)  # of a latent one the value comes from outside
        elif is_deterministic(msg) and self._is_enumerated(msg["value"]):
            msg["stop"] = True

    def _is_enumerated(self, value: Tensor) -> bool:
        return value.dim() > self.nesting and any(n > 1 for n in value.shape[: -self.nesting])

    def _pyro_post_sample(self, msg: Site) -> None:
        fn, value = msg["fn"], msg["value"]
        if not isinstance(fn, TorchDistributionMixin) or not isinstance(value, Tensor):
            return
        if self.discovers and is_latent(msg) and not msg["stop"]:  # continuous: any value does
            beyond = value.dim() - fn.event_dim - self.nesting
            value = msg["value"] = value[(0,) * max(0, beyond)]
        # Pyro's reads value.data, which vmap forbids
        shape = value.shape[: value.dim() - fn.event_dim]
        ids = msg["infer"].setdefault("_dim_to_id", {})
        ids.update(self._param_dims.get(msg["name"], {}))
        self._value_dims[msg["name"]] = {
            dim: number for dim, number in ids.items() if len(shape) >= -dim and shape[dim] > 1
        }
        if msg["name"] in self.mixed:
            self.priors[msg["name"]], fn = fn.log_prob(value), fn.fn
        if self.discovers or msg["stop"] or msg["name"] in self.factors:
            # the factor has the scale of its plates, and a factor by client takes whole batches
            scale = msg["scale"] / self.batch.row_scale if in_data(msg) else msg["scale"]
            self.sites.add_node(msg["name"], **{**msg, "fn": fn, "scale": scale})

    def total(self, component: Component) -> Tensor:
        """Return the log density of a component's sites, (C, B) by row or (C, 1) by client."""
        # the factor has the density of a mixed site, which its own prior has counted too
        prior = self.priors.get(component.mixed, 0.0)
        return Tables.of(component, self.sites, self.batch).counted() - prior


def summed_out(model: Model, batch: ClientBatch) -> Model:
    """Return a program without discrete latent sites, of one whose discrete sites have finite support.

    Args:
        model: the program.
        batch: a few rows of two clients.

    Raises:
        GlobalLabels: what is inside `batch.clients()` depends on a discrete site outside of it.
        ProgramError: a discrete site decides about a continuous site and more; or an elimination
            needs too large a table.
    """
    trace = plain_trace(model, batch)
    labels = global_labels(trace)
    if labels and reach_clients(model, batch, labels):
        raise GlobalLabels(labels)
    nesting = _nesting(trace)
    components = _components(model, batch, nesting)

    @wraps(model, updated=())
    def marginal(batch: ClientBatch) -> Any:
        asked_for = _TABLES.get()
        summed = components
        if asked_for is not None:
            summed = tuple(replace(of, is_mixture=False, mixed="") for of in components)
        with noting_parameters(), _Enumerated(nesting, summed, batch) as enumerated:
            value = model(batch)
        for component in summed:
            if component.is_mixture:
                continue
            if asked_for is not None:
                asked_for.append(Tables.of(component, enumerated.sites, batch))
                continue
            total = partial(enumerated.total, component)
            if CLIENTS in component.plates:
                add_factor(component.name, total, batch, by_row=DATA in component.plates)
            else:
                pyro.factor(component.name, total()[0, 0])
        return value

    return marginal


def tables_of(program: Program, values: Values, batch: ClientBatch, params: Params) -> list[Tables]:
    """Return the log densities of a program's discrete sites, given its continuous ones."""
    with noted_tables() as tables:
        program.conditioned(values, params, batch)
    return tables


@contextmanager
def noted_tables() -> Iterator[list[Tables]]:
    """Note the log densities of discrete sites of the programs that run meanwhile."""
    tables: list[Tables] = []
    with set_to(_TABLES, tables):
        yield tables


def _nesting(trace: Any) -> int:
    """Return how many batch dimensions the plates of a program take."""
    stacks = (site["cond_indep_stack"] for _, site in samples(trace))
    return max([2, *(-frame.dim for stack in stacks for frame in stack if frame.vectorized)])


def _components(model: Model, batch: ClientBatch, nesting: int) -> tuple[Component, ...]:
    """Return which discrete sites are summed out together, from one run of the program."""
    enumerated = _Enumerated(nesting, None, batch)
    with Center(), pyro.validation_enabled(False), enumerated:
        model(batch)
    trace = enumerated.sites
    refuse_first(_faults_of_steps(trace))
    trace.compute_log_prob()
    refuse_first(_faults_of_plates(trace))
    trace.pack_tensors()
    plates = set(trace.plate_to_symbol.values())
    tables = {n: set(site["packed"]["log_prob"]._pyro_dims) - plates for n, site in samples(trace)}
    of_labels = {
        name: dims
        for name, dims in tables.items()
        if dims and not is_deterministic(trace.nodes[name])
    }
    labels = {name for name in tables if is_enumerable(trace.nodes[name])}
    # labels that nothing depends on sum to 1
    groups = (names for names, _ in connected(of_labels))
    return tuple(_component(trace, names) for names in groups if not labels.issuperset(names))


def _faults_of_steps(trace: Any) -> Iterator[str]:
    """Say which site observes one row of each client as a step of a chain."""
    for name, site in samples(trace):
        if site["is_observed"] and in_clients(site) and not in_data(site) and not is_factor(site):
            shape = site["value"].shape[: site["value"].dim() - site["fn"].event_dim]
            if shape[-1:] != (1,):
                yield (
                    f"site '{name}' observes {shape[-1] if shape else 'no'} rows of a client outside "
                    "batch.data(): rows are not steps of a chain, since clients differ in their "
                    "numbers of them. Give the steps as columns of a field, one row per client, and "
                    "observe batch.y[..., step] inside batch.data()"
                )


def _faults_of_plates(trace: Any) -> Iterator[str]:
    """Say which site depends on all labels of a plate that it is not in."""
    for name, site in samples(trace):
        shape = site["log_prob"].shape
        own = {frame.dim for frame in site["cond_indep_stack"] if frame.vectorized}
        own |= {*site["infer"]["_dim_to_id"]}
        for dim in range(-len(shape), 0):
            if shape[dim] > 1 and dim not in own:
                yield (
                    f"site '{name}' depends on the discrete sites of a plate that it is not in (dim {dim}): "
                    "sample these labels in a loop of Python, one site each, or open the plate around "
                    f"'{name}'"
                )


def _component(trace: Any, names: Sequence[str]) -> Component:
    order = [name for name in trace.nodes if name in names]
    labels = tuple(name for name in order if is_enumerable(trace.nodes[name]))
    terms = tuple(name for name in order if name not in labels)
    stacks = {name: plates_of(trace.nodes[name]) for name in order}
    if len({CLIENTS in stack for stack in stacks.values()}) > 1:
        raise GlobalLabels(global_labels(trace))
    markov = any("_markov_depth" in trace.nodes[name]["infer"] for name in labels)
    is_scaled, is_apart = _scales(trace, labels, order)
    is_alone = len(terms) == len({*stacks.values()}) == 1 and not is_factor(trace.nodes[terms[0]])
    is_mixture = is_alone and not (markov or is_apart)
    latent = [name for name in terms if is_latent(trace.nodes[name])]
    mixed = latent[0] if latent and not is_mixture else ""
    in_one_plate = {stacks[name] for name in (*labels, *latent)} == {stacks[labels[0]]}
    if mixed and not (len(latent) == 1 and in_one_plate and set(order[: len(labels)]) == {*labels}):
        raise ProgramError(
            f"site '{mixed}' is continuous, and depends on discrete site '{labels[0]}', which "
            "other latent sites depend on as well, or which lies in another plate: give it a "
            "distribution that does not"
        )
    _check_size(trace, labels, order)
    common = frozenset.intersection(*stacks.values())
    return Component(labels, terms, common, is_mixture, is_scaled, mixed)


def _scales(trace: Any, labels: Sequence[str], names: Sequence[str]) -> tuple[bool, bool]:
    """Return whether all sites are scaled together, and whether labels are not, but their terms."""
    scales = {name: torch.as_tensor(trace.nodes[name]["scale"]) for name in names}
    is_one = {name: bool((scale == 1).all()) for name, scale in scales.items()}
    if all(is_one[name] for name in labels):
        return False, not all(is_one.values())
    if not all(torch.equal(scale, scales[labels[0]]) for scale in scales.values()):
        raise ProgramError(
            f"site '{labels[0]}' is discrete, and has another poutine.scale than the sites that "
            "depend on it: put all of them into one poutine.scale, or leave the discrete sites out"
        )
    return True, False


def _check_size(trace: Any, labels: Sequence[str], names: Sequence[str]) -> None:
    """Refuse an elimination that needs too large a table."""
    plates = set(trace.plate_to_symbol.values())
    tables = [trace.nodes[name]["packed"]["log_prob"] for name in names]
    shapes = [
        [n for d, n in zip(t._pyro_dims, t.shape, strict=True) if d not in plates] for t in tables
    ]
    inputs = ["".join(d for d in t._pyro_dims if d not in plates) for t in tables]
    _, path = opt_einsum.contract_path(",".join(inputs) + "->", *shapes, shapes=True)
    size = int(path.largest_intermediate)
    if size > LARGEST:
        raise ProgramError(
            f"summing out '{labels[0]}' and {len(labels) - 1} other discrete sites needs a table of "
            f"{size:,} entries for each client or row, and {LARGEST:,} is the limit: let each depend "
            "on fewer others, or mark a loop over time by pyro.markov"
        )
