"""Sums over the values of discrete sites by Pyro's message passing, and what they say of each site.

    log Z = log sum_k exp sum_i t_i(k),    t_i the log densities of labels and of what depends on them
    p(k_i = v | all else) = d log Z / d t_i(v)

A site's table of log densities with `v` fixed has -inf elsewhere, so that draws of all sites follow
one after another. Divided by a temperature near 0, log Z is that of the most probable values alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
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

COLD = 1e-4  # the temperature at which the most probable values alone count
NEVER = -1e30  # log density of a value that a draw did not take
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


@dataclass(frozen=True, eq=False)
class Tables:
    """The packed log densities of a component's sites, whose dimensions have a letter each.

    trace: the sites, packed.
    component: which of them are labels.
    batch: the rows.
    """

    trace: Trace
    component: Component
    batch: ClientBatch

    @staticmethod
    def of(component: Component, sites: Trace, batch: ClientBatch) -> Tables:
        """Return the tables of a component out of the sites of one run."""
        trace = Trace()
        for name in (*component.labels, *component.terms):
            trace.add_node(name, **sites.nodes[name])
        trace.compute_log_prob()
        trace.pack_tensors()
        return Tables(trace, component, batch)

    def log_sum(self, shifts: Mapping[str, Tensor] | None = None, heat: float = 1.0) -> Tensor:
        """Return log Z, (C, B) by row or (C, 1), with `shifts` added to the labels' tables."""
        trace, symbols = self.trace, self.trace.plate_to_symbol
        tree: OrderedDict[Plates, list[Tensor]] = OrderedDict()
        for name, site in trace.nodes.items():
            table: Any = site["packed"]["log_prob"]
            dims = table._pyro_dims
            table = (table + shifts[name] if shifts and name in shifts else table) / heat
            table._pyro_dims = dims
            tree.setdefault(frozenset(symbols[p] for p in plates_of(site)), []).append(table)
        summed = set(trace.symbol_to_dim) - set(symbols.values())
        # asking for the mask is how a program says that its density of several rows leaves padding out
        ring = _Ring(self.batch.mask(), symbols)
        total = torch.zeros(())
        for own, tensors in contract_tensor_tree(tree, summed, ring=ring).items():
            inner = own - {symbols[name] for name in (CLIENTS, DATA) if name in symbols}
            for tensor in tensors:
                total = total + _by_row(ring.product(tensor, inner), symbols)
        by_row = DATA in self.component.plates
        return total.expand(self.batch.num_clients, self.batch.num_rows if by_row else 1)

    def probabilities(self, shifts: Mapping[str, Tensor], heat: float = 1.0) -> dict[str, Tensor]:
        """Return the probabilities of each label's values given `shifts`, in the form of its table."""

        def total(moved: Mapping[str, Tensor]) -> Tensor:
            sums = self.log_sum(moved, heat)
            if sums.shape[-1] > 1:  # padded rows say nothing
                sums = torch.where(self.batch.mask(), sums, 0.0)
            return heat * sums.sum()

        slopes: dict[str, Tensor] = torch.func.grad(total)(dict(shifts))
        return slopes

    def shifts(self) -> dict[str, Tensor]:
        """Return zeros in the form of the labels' tables."""
        nodes = self.trace.nodes
        return {n: torch.zeros_like(nodes[n]["packed"]["log_prob"]) for n in self.component.labels}

    def drawn(self, name: str, chances: Tensor, uniforms: Callable[[Tensor], Tensor]) -> Tensor:
        """Return one value of a label drawn by its probabilities, as 0 and 1 in the form of its table."""
        axis = self._axis(name)
        up = chances.cumsum(axis)
        point = uniforms(chances.select(axis, 0)).unsqueeze(axis) * up.narrow(axis, -1, 1)
        at = (up <= point).sum(axis, keepdim=True).clamp(max=chances.shape[axis] - 1)
        return torch.zeros_like(chances).scatter(axis, at, 1.0)

    def by_value(self, name: str, table: Tensor) -> Tensor:
        """Return a label's table, of its own values and plates alone, as (*plates, C, B or 1, K)."""
        dims = list(self._dims(name))
        own = self._symbol(name)
        plates = set(self.trace.plate_to_symbol.values())
        others = [axis for axis, dim in enumerate(dims) if dim not in plates and dim != own]
        table = table.sum(others) if others else table
        dims = [dim for axis, dim in enumerate(dims) if axis not in others]
        order = sorted(
            (dim for dim in dims if dim != own), key=self.trace.symbol_to_dim.__getitem__
        )
        table = table.permute([dims.index(dim) for dim in [*order, own]])
        depth = max([2, *(-self.trace.symbol_to_dim[dim] for dim in order)])
        shape = [1] * depth
        for dim, size in zip(order, table.shape, strict=False):
            shape[self.trace.symbol_to_dim[dim]] = size
        return table.reshape(*shape, table.shape[-1])

    def _symbol(self, name: str) -> str:
        site: Any = self.trace.nodes[name]
        return str(site["infer"]["_enumerate_symbol"])

    def _dims(self, name: str) -> str:
        site: Any = self.trace.nodes[name]
        return str(site["packed"]["log_prob"]._pyro_dims)

    def _axis(self, name: str) -> int:
        return int(
            self.trace.nodes[name]["packed"]["log_prob"]._pyro_dims.index(self._symbol(name))
        )


def _by_row(value: Any, symbols: Mapping[str, str]) -> Tensor:
    """Return a packed tensor as (C, B) or (C, 1), with size 1 where it is constant."""
    order = "".join(symbols[name] for name in (CLIENTS, DATA) if name in symbols)
    dims: str = value._pyro_dims
    value = value.permute([dims.index(dim) for dim in order if dim in dims])
    sizes = iter(value.shape)
    shape = [next(sizes) if symbols.get(name, "-") in dims else 1 for name in (CLIENTS, DATA)]
    return value.reshape(shape)
