"""Sums over the values of discrete sites by Pyro's message passing, and what they say of each site.

    log Z = log sum_k exp sum_i t_i(k)
    p(k_i = v | all else) = d log Z / d t_i(v)

Here t_i are the log densities of labels and of what depends on them. Draws of all labels follow one
after another: values that a label did not take are ruled out of its t_i.
"""

from __future__ import annotations

import math
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
    is_scaled: `poutine.scale` counts all of its sites together.
    mixed: the continuous site that depends on labels, if there is one; its prior is their mixture.
    """

    labels: tuple[str, ...]
    terms: tuple[str, ...]
    plates: Plates
    is_mixture: bool
    is_scaled: bool = False
    mixed: str = ""

    @property
    def name(self) -> str:
        """The name of its factor: of its term, or of all of them."""
        return "+".join(self.terms)


def plates_of(site: Site) -> Plates:
    """Return the names of the plates that a site is in."""
    return frozenset(frame.name for frame in site["cond_indep_stack"] if frame.vectorized)


def batch_shape_of(site: Site, least: int = 0) -> tuple[int, ...]:
    """Return the sizes of a site's plates in their dimensions, of `least` or more; 1 where there is none."""
    sizes = {frame.dim: frame.size for frame in site["cond_indep_stack"] if frame.vectorized}
    return tuple(sizes.get(dim, 1) for dim in range(min([-least, *sizes]), 0))


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
    scale: of `poutine.scale` around all of the sites.
    """

    trace: Trace
    component: Component
    batch: ClientBatch
    scale: Tensor | float = 1.0

    @staticmethod
    def of(component: Component, sites: Trace, batch: ClientBatch) -> Tables:
        """Return the tables of a component out of the sites of one run."""
        trace, scale = Trace(), sites.nodes[component.labels[0]]["scale"]
        for name in (*component.labels, *component.terms):
            own = 1.0 if component.is_scaled else sites.nodes[name]["scale"]
            trace.add_node(name, **{**sites.nodes[name], "scale": own})
        trace.compute_log_prob()
        for name in component.labels:
            _normalize(trace.nodes[name])
        trace.pack_tensors()
        return Tables(trace, component, batch, scale if component.is_scaled else 1.0)

    def counted(self) -> Tensor:
        """Return log Z as often as `poutine.scale` counts it, (C, B) or (C, 1)."""
        return self.scale * self.log_sum()

    def log_sum(self, shifts: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return log Z, (C, B) by row or (C, 1) by client.

        Args:
            shifts: label -> what is added to its log densities, (K, *plates, C, B), where 1
                stands for a plate of clients or rows that the label is not in.
        """
        trace, symbols = self.trace, self.trace.plate_to_symbol
        tree: OrderedDict[Plates, list[Tensor]] = OrderedDict()
        for name, site in trace.nodes.items():
            table = site["packed"]["log_prob"]
            if shifts and name in shifts:
                table = _shifted(site, shifts[name])
            own = frozenset(symbols[plate] for plate in plates_of(site))
            tree.setdefault(own, []).append(table)
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

    def probabilities(self, shifts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the probabilities of each label's values given `shifts`, in their form."""

        def total(moved: Mapping[str, Tensor]) -> Tensor:
            sums = self.log_sum(moved)
            return (torch.where(self.batch.mask(), sums, 0.0) if sums.shape[1] > 1 else sums).sum()

        slopes: dict[str, Tensor] = torch.func.grad(total)(dict(shifts))
        return slopes

    def no_shifts(self) -> dict[str, Tensor]:
        """Return zeros in the form of `shifts`."""
        shifts = {}
        for name in self.component.labels:
            site: Any = self.trace.nodes[name]
            count = site["fn"].enumerate_support(expand=False).shape[0]
            shifts[name] = torch.zeros(count, *batch_shape_of(site, least=2))
        return shifts


def _normalize(label: Any) -> None:
    """Give the values of a masked label equal probabilities, which sum to 1 as others do."""
    if label["mask"] is not None:
        count = label["fn"].enumerate_support(expand=False).shape[0]
        mask = torch.as_tensor(label["mask"])
        label["log_prob"] = torch.where(mask, label["log_prob"], -math.log(count))


def _shifted(site: Any, shift: Tensor) -> Tensor:
    """Return a label's packed log densities with a shift (K, *plates, C, B)."""
    between = -site["infer"]["_enumerate_dim"] - shift.dim()
    shift = shift.reshape(shift.shape[0], *[1] * between, *shift.shape[1:])
    whole: Any = packed.broadcast_all(
        site["packed"]["log_prob"], packed.pack(shift, site["infer"]["_dim_to_symbol"])
    )
    total = whole[0] + whole[1]
    total._pyro_dims = whole[0]._pyro_dims
    return total


def _by_row(value: Any, symbols: Mapping[str, str]) -> Tensor:
    """Return a packed tensor as (C, B) or (C, 1), with size 1 where it is constant."""
    order = "".join(symbols[name] for name in (CLIENTS, DATA) if name in symbols)
    dims: str = value._pyro_dims
    value = value.permute([dims.index(dim) for dim in order if dim in dims])
    sizes = iter(value.shape)
    shape = [next(sizes) if symbols.get(name, "-") in dims else 1 for name in (CLIENTS, DATA)]
    return value.reshape(shape)
