"""Sums over the values of discrete sites, by Pyro's message passing.

log sum_k exp sum_i t_i(k),    t_i the log densities of labels and of what depends on them
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro.ops import packed
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.rings import LogRing
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from hierfl.data.batch import CLIENTS, DATA, ClientBatch
from hierfl.program.traces import Site

Plates = frozenset[str]


@dataclass(frozen=True)
class Component:
    """Discrete sites that are summed out together.

    labels: their names, in the order of the program.
    terms: the sites that depend on them.
    plates: which the result keeps.
    is_mixture: the only term gets the mixture of its distributions, in place of a factor.
    """

    labels: tuple[str, ...]
    terms: tuple[str, ...]
    plates: Plates
    is_mixture: bool

    @property
    def name(self) -> str:
        """The name of its factor: of its term, or of all of them."""
        return "+".join(self.terms)


def plates_of(site: Site) -> Plates:
    """Return the names of the plates that a site is in."""
    return frozenset(frame.name for frame in site["cond_indep_stack"] if frame.vectorized)


class _Ring(LogRing):
    """Log space, by a backend that `torch.func` can carry; products leave padded rows out."""

    _backend = "hierfl.program.log_einsum"

    def __init__(self, rows: Tensor, symbols: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.data = symbols.get(DATA)
        dims = {-1: self.data, -2: symbols.get(CLIENTS)}
        self.rows = None if self.data is None else packed.pack(rows.clone(), dims)

    def product(self, term: Any, ordinal: Plates) -> Any:
        if self.data in ordinal:
            term = packed.scale_and_mask(term, mask=self.rows)
        return super().product(term, ordinal)  # type: ignore[no-untyped-call]


def log_sum(component: Component, sites: Trace, batch: ClientBatch) -> Tensor:
    """Return the log of the sum over a component's labels, (C, B) by row or (C, 1) by client."""
    trace = Trace()
    for name in (*component.labels, *component.terms):
        trace.add_node(name, **sites.nodes[name])
    trace.compute_log_prob()
    trace.pack_tensors()
    symbols = trace.plate_to_symbol
    tree: OrderedDict[Plates, list[Tensor]] = OrderedDict()
    for site in trace.nodes.values():
        own = frozenset(symbols[plate] for plate in plates_of(site))
        tree.setdefault(own, []).append(site["packed"]["log_prob"])
    summed = set(trace.symbol_to_dim) - set(symbols.values())
    # asking for the mask is how a program says that its density of several rows leaves padding out
    ring = _Ring(batch.mask(), symbols)
    total = torch.zeros(())
    for own, tensors in contract_tensor_tree(tree, summed, ring=ring).items():
        inner = own - {symbols[name] for name in (CLIENTS, DATA) if name in symbols}
        for tensor in tensors:
            total = total + _by_row(ring.product(tensor, inner), symbols)
    return total.expand(batch.num_clients, batch.num_rows if DATA in component.plates else 1)


def _by_row(value: Any, symbols: Mapping[str, str]) -> Tensor:
    """Return a packed tensor as (C, B) or (C, 1), with size 1 where it is constant."""
    order = "".join(symbols[name] for name in (CLIENTS, DATA) if name in symbols)
    dims: str = value._pyro_dims
    value = value.permute([dims.index(dim) for dim in order if dim in dims])
    sizes = iter(value.shape)
    shape = [next(sizes) if symbols.get(name, "-") in dims else 1 for name in (CLIENTS, DATA)]
    return value.reshape(shape)
