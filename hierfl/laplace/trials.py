"""A program evaluated at given values, on made-up rows where its structure is found by trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from pyro import poutine
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.program.handlers import Answer
from hierfl.program.program import Program
from hierfl.program.sites import Values
from hierfl.program.traces import Site, samples


def perturbed(
    batch: ClientBatch,
    *,
    names_of_labels: frozenset[str],
    g: torch.Generator,
    codes: Mapping[str, tuple[int, int]] | None = None,
) -> ClientBatch:
    """Return a batch with its floating features perturbed and its labels kept.

    Integers are redrawn in the ranges of `codes`: the first rows of a client often have one code,
    whose effect would look like the client's own.
    """

    def moved(name: str, v: Tensor) -> Tensor:
        if name in names_of_labels:
            return v
        if codes is not None and name in codes:
            low, high = codes[name]
            return torch.randint(low, high + 1, v.shape, generator=g).to(v.dtype)
        if not v.is_floating_point():
            return v
        u = torch.rand(v.shape, generator=g, dtype=v.dtype)  # positive features stay positive
        return v * (1.0 + 0.3 * u) + 0.1 * u

    return replace(
        batch, fields={name: moved(name, v) for name, v in batch.fields.items()}, rows=None
    )


def first_row(batch: ClientBatch) -> ClientBatch:
    """Return a batch of each client's first row alone."""
    fields = {name: v[:, :1] for name, v in batch.fields.items()}
    return replace(batch, fields=fields, rows=None if batch.rows is None else batch.rows[:, :1])


def sites_at(program: Program, values: Values, batch: ClientBatch) -> dict[str, Site]:
    """Return the sample sites of the model on a batch, by name, with the values given."""
    with Answer({}, batch):
        trace = poutine.trace(poutine.condition(program.model, data=values)).get_trace(batch)
    return dict(samples(trace))


def terms_at(program: Program, values: Values, batch: ClientBatch) -> dict[str, Site]:
    """Return the terms of the likelihood, by name, with the values given to all latent sites."""
    sites = sites_at(program, values, batch)
    return {name: sites[name] for name in (*program.labels, *program.factors)}


def alike(one: Tensor, other: Tensor, *, exact: float = 1e-8) -> bool:
    """Return whether two tensors are equal up to rounding, relative and absolute."""
    return bool(torch.allclose(one, other, rtol=exact, atol=exact))
