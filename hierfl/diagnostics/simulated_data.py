"""Data sets drawn from a model: its sites, and the labels of every row."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Unit
from torch import Tensor

from hierfl.core import noise
from hierfl.data.batch import ClientBatch
from hierfl.program.check_dependence import computed_from
from hierfl.program.handlers import unchecked, untouched_store
from hierfl.program.program import Program, ProgramError
from hierfl.program.sites import Values
from hierfl.program.traces import AtSites, Site, is_deterministic, samples

Labels = dict[str, Tensor]


def drawn(program: Program, batch: ClientBatch, *, count: int, seed: int) -> tuple[Values, Labels]:
    """Draw `count` data sets, (count, *shape) a site or observed field; a data set's number seeds it."""
    for fault in _faults(program, batch):
        raise ProgramError(fault)
    names = [*(site.name for site in program.latents.sites), *program.derived]
    values, labels = list[Values](), list[Labels]()
    with untouched_store(), unchecked(), torch.no_grad():
        for one in range(count):
            first, second = noise.fold(noise.root_key(seed), one).tolist()
            noise.seed_torch(((first & 0x7FFFFFFF) << 32) | (second & 0xFFFFFFFF))
            with AtSites(_unobserve):
                nodes: Any = poutine.trace(program.model).get_trace(batch).nodes
            values.append({name: nodes[name]["value"] for name in names})
            of_fields = program.labels.items()
            labels.append({field: _as_field(nodes[s], batch, field) for s, field in of_fields})
    _check_labels(program, batch, labels[0])
    return (
        {k: torch.stack([v[k] for v in values]) for k in values[0]},
        {k: torch.stack([v[k] for v in labels]) for k in labels[0]},
    )


def _unobserve(site: Site) -> None:
    """Let an observed site be drawn; deterministic ones keep their values."""
    if site["is_observed"] and not is_deterministic({**site, "type": "sample"}):
        site["is_observed"], site["value"], site["done"] = False, None, False


def with_labels(batch: ClientBatch, labels: Labels) -> ClientBatch:
    """Replace the observed fields of a batch."""
    fields, client_fields = (
        {name: labels.get(name, value) for name, value in of.items()}
        for of in (batch.fields, batch.client_fields)
    )
    return replace(batch, fields=fields, client_fields=client_fields)


def _as_field(site: Any, batch: ClientBatch, field: str) -> Tensor:
    like: Tensor = {**batch.fields, **batch.client_fields}[field]
    value: Tensor = site["value"]
    value = value.squeeze(1) if value.dim() == like.dim() + 1 else value
    return value.expand(like.shape).to(like.dtype)


def _faults(program: Program, batch: ClientBatch) -> Iterator[str]:
    """Yield why data sets cannot be drawn from a model."""
    with untouched_store():
        trace = poutine.trace(program.model).get_trace(batch)
    for name, node in trace.nodes.items():
        if node["type"] == "param":
            yield (
                f"the model's param '{name}' has no prior to draw from: use a pyro.sample statement "
                "in its place"
            )
    for name, site in samples(trace):
        if isinstance(getattr(site["fn"], "base_dist", site["fn"]), Unit):
            yield f"factor '{name}' cannot be drawn: data sets can be drawn from sample statements only"
    fields = list(program.labels.values())
    for field in dict.fromkeys(fields):
        site = computed_from(program, field)
        if site:
            yield (
                f"site '{site}' is computed from the field '{field}', which is to be drawn: data "
                "sets can be drawn only where no label depends on another"
            )
        if fields.count(field) > 1:
            yield (
                f"two sites observe the field '{field}', and their draws would differ: give each "
                "site a field of its own"
            )


def _check_labels(program: Program, batch: ClientBatch, labels: Labels) -> None:
    """Refuse a model that observes something computed from a field."""
    with untouched_store(), unchecked():
        nodes: Any = poutine.trace(program.model).get_trace(with_labels(batch, labels)).nodes
    for site, field in program.labels.items():
        if not torch.equal(_as_field(nodes[site], batch, field), labels[field]):
            raise ProgramError(
                f"site '{site}' observes something computed from the field '{field}': make it a "
                f"field of its own, data.with_fields({site}=...), that draws can replace"
            )
