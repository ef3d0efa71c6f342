"""Checks of what a program depends on: params, own rows and keys alone, not padding or other clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from hierfl.core import noise
from hierfl.core.process import set_to
from hierfl.data.batch import ClientBatch, gather, keys_of, mapped
from hierfl.data.clients import ClientData
from hierfl.program.few_rows import distinct_rows, first_difference, made_up, point
from hierfl.program.handlers import (
    AT_MIDDLES,
    Substitute,
    TakesWeights,
    untouched_store,
)
from hierfl.program.program import Params, Program, ProgramError, stacked
from hierfl.program.sites import Values
from hierfl.program.traces import NAME, Site, in_clients, in_data, per_client, samples, scored
from hierfl.program.without_rows import WithoutRows


@contextmanager
def no_global_draws(what: str, *, starts: bool = False) -> Iterator[None]:
    """Refuse a model or guide that moves a global generator in this context; params may start by torch's."""
    with noise.global_draws(of_torch=not starts) as moved:
        yield
    if moved:
        raise ProgramError(
            f"the {what} draws from {moved[0]}, which no seed of hierfl sets and whose draws "
            "differ between engines: draw with pyro.sample; the start of a param is drawn by a "
            "function, pyro.param(name, lambda: torch.randn(3))"
        )


def leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of a tensor's graph, which require a gradient."""
    if tensor.requires_grad and tensor.grad_fn is None:
        yield tensor
    seen: set[Any] = set()
    ahead = [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        ahead.extend(following for following, _ in node.next_functions)


class _Marked(TakesWeights):
    """Marks values of local sites and params by `requires_grad`, which dependents inherit."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: set[Tensor] = set()

    def marked(self, value: Tensor) -> Tensor:
        """Return a copy of a tensor that carries a mark, if its dtype can."""
        if not value.is_floating_point():
            return value
        copy = value.detach().clone().requires_grad_()
        self.marks.add(copy)
        return copy

    def _pyro_post_sample(self, msg: Site) -> None:
        if in_clients(msg) and not msg["is_observed"]:
            msg["value"] = self.marked(msg["value"])

    def _pyro_post_param(self, msg: Site) -> None:
        msg["value"] = self.marked(msg["value"]) if in_clients(msg) else msg["value"].detach()
        super()._pyro_post_param(msg)


def check_boundary(
    program: Callable[[ClientBatch], Any], batch: ClientBatch, what: str, *handlers: Messenger
) -> None:
    """Refuse a global site that depends on rows, local sites or params, or means over clients."""
    handler = _Marked()
    marked = mapped(batch, handler.marked)
    with untouched_store(), ExitStack() as stack, torch.enable_grad():
        for messenger in (handler, *handlers):
            stack.enter_context(messenger)
        try:
            trace: Any = poutine.trace(program).get_trace(marked)
        except RuntimeError:
            return  # the program takes values out of autograd (`.numpy()`), and cannot be checked
        for name, site in samples(trace):
            depends = chain.from_iterable(map(leaves, tensors_of(site)))
            if not in_clients(site) and not handler.marks.isdisjoint(depends):
                raise ProgramError(
                    f"site '{name}' is outside the clients plate in the {what}, but depends on "
                    "something inside it (a client's rows, local sites or local params): move it "
                    "inside `with batch.clients():`, or remove the dependence"
                )


def check_pure(program: Program, batch: ClientBatch) -> None:
    """Refuse a program with its own noise, state or weights, by running it twice."""
    shared, own = program.start()
    params = {**shared, **own}
    with torch.enable_grad():
        first, second = _traces(program, params, batch), _traces(program, params, batch)
        for what, trace in first.items():
            again = dict(samples(second[what]))
            for name, site in samples(trace):
                _check_site(name, what, site, again.get(name))


def _traces(program: Program, params: Mapping[str, Tensor], batch: ClientBatch) -> dict[str, Any]:
    with untouched_store(), Substitute(params, batch):
        with no_global_draws("guide"):
            guided = poutine.trace(program.guide).get_trace(batch)
        with no_global_draws("model"):
            modeled = poutine.trace(poutine.replay(program.model, guided)).get_trace(batch)
    return {"guide": guided, "model": modeled}


def tensors_of(site: Site) -> Iterator[Tensor]:
    """Yield the value of a site and its log density, where it has one."""
    if isinstance(site["value"], Tensor):
        yield site["value"]
    try:
        density = site["fn"].log_prob(site["value"])
    except (NotImplementedError, ValueError, RuntimeError, AssertionError):
        return  # other checks say so
    if isinstance(density, Tensor):
        yield density


def _check_site(name: str, what: str, site: Site, again: Site | None) -> None:
    """Refuse a site that differs between two equal runs, or needs a gradient that is no param's."""
    first, second = list(tensors_of(site)), [] if again is None else list(tensors_of(again))
    if len(first) != len(second) or not all(map(_equal, first, second)):
        raise ProgramError(
            f"site '{name}' of the {what} differs between two runs with the same params, rows and "
            f"noise, so the {what} has a generator (np.random.default_rng, torch.Generator) or "
            "another state of its own: draw with pyro.sample, and compute the site from rows, "
            "params and other sites alone"
        )
    for leaf in chain.from_iterable(map(leaves, first)):
        raise ProgramError(
            f"site '{name}' of the {what} depends on a tensor of shape {tuple(leaf.shape)}, which "
            "requires a gradient and is not a param, so that no method learns it: register it "
            "(pyro.module('net', net), pyro.param), or freeze it on purpose with "
            "requires_grad_(False)"
        )


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding, which memory alignment may change."""
    a, b = a.detach(), b.detach()
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    close = torch.finfo(a.dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=close, atol=close, equal_nan=True)


PADDED = 6  # rows to which the few are padded


def is_ragged(data: ClientData) -> bool:
    """Return whether clients differ in their numbers of rows, so that some are padded."""
    return bool((data.counts != data.counts[0]).any())


def check_padding(program: Program, data: ClientData) -> None:
    """Refuse a program whose log density depends on padded rows."""
    if not is_ragged(data):
        return
    alone, padded = made_up(program, data), made_up(program, data, PADDED)
    rows, site = alone.num_rows, None
    ours = str(getattr(program.guide, "__module__", "")).split(".")[0] == "hierfl"
    if not ours:  # hierfl's own families leave padded rows out
        site = first_difference(partial(_of_guide, program), alone, padded)
    what = "the guide's site" if site else "site"
    of_model = partial(_of_model, program, keep=torch.arange(rows))
    site = site or first_difference(of_model, alone, padded)
    if site:
        raise ProgramError(
            f"{what} '{site}' depends on padding, since {rows} rows of a client give another value "
            f"padded to {padded.num_rows} than alone: reduce over rows by batch.sum and "
            "batch.mean, or leave padded rows out by batch.mask()"
        )


def check_mini_batches(
    program: Program, data: ClientData, *, priors_alone: bool = False, halves: bool = False
) -> None:
    """Refuse a log density that is no sum over rows, since mini-batches stand for all rows."""
    site = None if priors_alone else next(iter(program.joint), None)
    if site is None and data.num_rows > 1:
        site = _of_several_rows(program, made_up(program, data), priors_alone)
    if site:
        why, fix = (
            "mini-batches hold only some of them, in random order",
            "leave batch_size at None",
        )
        if halves:
            why = "the method splits them at random into two halves"
            fix = "set split=False and batch_size=None"
        fix += ", or give each row what it needs of other rows as a field of its own, "
        fix += "data.with_fields(previous=...)"
        if priors_alone:
            fix = "compute it from a client field, or use another method, such as fedsvi"
        raise ProgramError(
            f"site '{site}' depends on several rows of its client at once, and {why}: {fix}"
        )


def _of_several_rows(program: Program, alone: ClientBatch, priors_alone: bool) -> str | None:
    """Return a site whose terms change if rows are reversed and the first one left out."""
    rows = alone.num_rows
    back = torch.arange(rows - 1, 0, -1)
    fields = {name: v.index_select(1, back) for name, v in alone.fields.items()}
    sites = set(map(NAME, program.latents.sites)) if priors_alone else None

    def evaluate(away: float, batch: ClientBatch) -> Values:
        keep = back if batch.num_rows == rows else torch.arange(rows - 1)
        with set_to(AT_MIDDLES, True):
            return _of_model(program, away, batch, keep, derived=False, sites=sites)

    return first_difference(evaluate, alone, replace(alone, fields=fields))


def check_labels_given(program: Program, rows: ClientData) -> None:
    """Refuse to predict unlabeled rows if a site is computed from labels (autoregression)."""
    if isinstance(program.model, WithoutRows):  # the prototype is made up, and may be read
        program = replace(program, model=program.model.run)
    for label in set(program.labels.values()) - {*rows.fields, *rows.client_fields}:
        site = computed_from(program, label)
        if site:
            raise ValueError(
                f"site '{site}' is computed from field '{label}', which the rows do not have: give "
                "the rows their labels"
            )


def computed_from(program: Program, label: str) -> str | None:
    """Return an observed site whose distribution depends on a label of rows, or None."""
    prototype = program.prototype
    if label not in prototype.fields:
        return None
    value = prototype.fields[label]
    other = ~value if value.dtype == torch.bool else value + 1
    changed = replace(prototype, fields={**prototype.fields, label: other})

    def evaluate(away: float, batch: ClientBatch) -> Values:
        params, values = point(program, away)
        observed = program.observed(values, batch, params)
        labels = program.observed(values, prototype, params)
        return {site: fn.log_prob(labels[site][1]) for site, (fn, _) in observed.items()}

    return first_difference(evaluate, prototype, changed)


def _of_model(
    program: Program,
    away: float,
    batch: ClientBatch,
    keep: Tensor,
    *,
    derived: bool = True,
    sites: Collection[str] | None = None,
) -> Values:
    """Return log densities of local sites, by row in the data plate, and deterministic sites."""
    params, values = point(program, away)
    with Substitute(params, batch):
        trace: Any = poutine.trace(poutine.condition(program.model, data=values)).get_trace(batch)
    terms: Values = {}
    for name, site in samples(trace):
        is_chosen = sites is None or name in sites
        if is_chosen and in_clients(site) and name not in program.derived:
            term = scored(site, site["fn"].log_prob(site["value"]))
            terms[name] = term.index_select(-1, keep) if in_data(site) else term
    for name in program.derived if derived else ():
        terms[name] = trace.nodes[name]["value"]
    return terms


def _of_guide(program: Program, away: float, batch: ClientBatch) -> Values:
    params, _ = point(program, away)
    with Substitute(params, batch):
        trace = poutine.trace(program.guide).get_trace(batch)
    sites: Values = {}
    for name, site in samples(trace):
        density = site["fn"].log_prob(site["value"])
        sites[name] = torch.cat([site["value"].flatten(), density.flatten()])
    return sites


def check_apart(program: Program, data: ClientData) -> None:
    """Refuse a program in which a client's log density depends on others in its batch."""
    if data.num_clients == 1:
        return
    distinct = distinct_rows(data, tuple(program.labels.values()))
    rows = max(PADDED, len(distinct))
    index = torch.stack(
        [distinct[torch.arange(rows) % len(distinct)], distinct.flip(0)[:1].expand(rows)]
    )
    ids = torch.tensor([0, data.num_clients - 1])
    pair = gather(data, ids, index, None, keys_of(data, ids, 0, 0))
    pair = replace(pair, counts=torch.full_like(pair.counts, rows))
    first = replace(mapped(pair, lambda v: v[:1]), own_keys=pair.own_keys[:1])

    def evaluate(away: float, batch: ClientBatch) -> Values:
        params, values = _of_clients(program, away, batch.num_clients)
        with Substitute(params, batch):
            trace = poutine.trace(poutine.condition(program.model, data=values)).get_trace(batch)
        terms: Values = {}
        for name, site in samples(trace):
            if in_clients(site):
                density = scored(site, site["fn"].log_prob(site["value"]))
                terms[name] = per_client(density)[:1]
        return terms

    if dependent := first_difference(evaluate, first, pair):
        raise ProgramError(
            f"site '{dependent}' depends on which clients are in the batch, and here all of them are: "
            "reduce over the rows of each client, by batch.mean and batch.sum, not over clients"
        )


def _of_clients(program: Program, away: float, count: int) -> tuple[Params, Values]:
    """Return params and latent sites of clients; the first client's do not vary with `count`."""
    points = [point(program, away, seed=seed) for seed in range(count)]
    params, values = points[0]
    local = [spec.name for spec in program.params if spec.is_local]
    own = {name: torch.stack([p[name] for p, _ in points]) for name in local}
    sites = dict(values)
    for site in program.latents.local_block.sites:
        axis = len(site.batch_shape) - 2
        sites[site.name] = torch.cat([v[site.name] for _, v in points], axis)
    return {**params, **stacked(program, own)}, sites
