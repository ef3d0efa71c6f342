"""Discrete sites of all clients, outside of `batch.clients()`: which they are, and whom they reach."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.program.elimination import batch_shape_of
from hierfl.program.program import ProgramError
from hierfl.program.row_structure import Fixed
from hierfl.program.sites import Model, Values
from hierfl.program.traces import Center, in_clients, is_enumerable, samples


class Label(NamedTuple):
    """The `support` (K, *event) of a discrete site outside of `batch.clients()`, and its plates' `sizes`."""

    support: Tensor
    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """(*sizes, *event)."""
        return (*self.sizes, *self.support.shape[1:])


class GlobalLabels(ProgramError):
    """Discrete sites outside of `batch.clients()` reach clients: their sum is of products over all clients.

    Args:
        sites: by name.
    """

    def __init__(self, sites: Mapping[str, Label]) -> None:
        super().__init__(
            f"site '{next(iter(sites))}' is discrete, and outside of batch.clients(): its sum is one "
            "of products over all clients, which no client can compute alone. Where the rows are, "
            f"hierfl.fit(model, data) fits the model at each value of {', '.join(sites)}, and weights "
            "these fits by their evidence"
        )
        self.sites = sites

    @property
    def count(self) -> int:
        """The number of joint values."""
        return math.prod(len(of.support) ** math.prod(of.sizes) for of in self.sites.values())

    def each(self) -> Iterator[list[Tensor]]:
        """Yield the values of each site, (*sizes, *event)."""
        for label in self.sites.values():
            places = itertools.product(label.support, repeat=math.prod(label.sizes))
            yield [torch.stack(place).reshape(label.shape) for place in places]


def plain_trace(model: Model, batch: ClientBatch, values: Values | None = None) -> Any:
    """Trace a program with latent sites at their centers, and some at `values`."""
    model = pyro.poutine.condition(model, values or {})
    with Center(), Fixed({}), pyro.validation_enabled(False):
        return pyro.poutine.trace(model).get_trace(batch)


def reach_clients(model: Model, batch: ClientBatch, labels: Mapping[str, Label]) -> bool:
    """Return whether what is inside `batch.clients()` depends on labels outside, all else the same.

    It finds what enumeration cannot: the sum of a plate's labels has lost their dimension.
    """
    log_p: list[list[Tensor]] = []
    for at in (0, -1):
        point = {name: label.support[at].expand(label.shape) for name, label in labels.items()}
        trace = plain_trace(model, batch, point)
        trace.compute_log_prob()
        log_p.append([site["log_prob"] for _, site in samples(trace) if in_clients(site)])
    return any(not torch.equal(*pair) for pair in zip(*log_p, strict=True))


def global_labels(trace: Any) -> dict[str, Label]:
    """Return the discrete sites outside of `batch.clients()`."""
    labels = {}
    for name, site in samples(trace):
        if is_enumerable(site) and not in_clients(site):
            support = site["fn"].enumerate_support(expand=False)
            event = support.shape[support.dim() - site["fn"].event_dim :]
            labels[name] = Label(support.reshape(-1, *event), batch_shape_of(site))
    return labels
