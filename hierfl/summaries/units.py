"""Units: what the likelihood of many clients is a product over, each a client to the program.

A unit is a row, or all rows of a client where a likelihood is no product (a Gaussian process).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hierfl.core.graphs import graph_of
from hierfl.data.batch import ClientBatch, in_double
from hierfl.laplace.links import predictors, scores
from hierfl.laplace.trials import FAILS, moved_rows, nearly_equal
from hierfl.program.supports import kind_of
from hierfl.summaries.reading import Line, nodes_of, start_of

AWAY = 0.3  # sd of the random points at which a graph is compared with its program
COMPARED = 8  # units on which it is
# scalars of a row beyond which equal rows are not looked for, and the share of distinct rows at most
MOST_COLUMNS, FEW_EQUAL = 64, 0.8


class EqualRows(NamedTuple):
    """Rows of a client that agree in some fields; m groups, those of the first client first."""

    of: Tensor  # (n,) int64, the group of each row
    times: Tensor  # (m,) how many rows each has
    first: Tensor  # (m,) int64, the position of its first row


@dataclass(frozen=True, eq=False)
class Units:
    """The tensors of n units, each of which is a client to the program."""

    like: ClientBatch  # of one client, whose fields the units' take the place of
    fields: dict[str, Tensor]  # (n, 1, B, ...) each, B rows a unit
    client_fields: dict[str, Tensor]  # (n, 1, 1, ...) each
    masks: Tensor | None  # (n, 1, B) bool, false at padded rows; None: there are none
    counts: Tensor  # (n, 1) numbers of rows
    client: Tensor  # (n,) int64, the position of each unit's client, ascending
    clients: int  # C
    times: Tensor | None = None  # (n,) how many rows each unit stands for; None: one each

    @classmethod
    def of(cls, batch: ClientBatch, *, by_row: bool) -> Units:
        """Return the units of a batch, in double precision: its rows, or its clients."""
        batch = in_double(batch)
        like = replace(batch, fields={}, client_fields={}, rows=None, own_keys=batch.own_keys[:1])
        count = batch.num_clients
        if not by_row:
            fields = {n: v[:, None] for n, v in batch.fields.items()}
            own = {n: v[:, None] for n, v in batch.client_fields.items()}
            masks = None if batch.rows is None else batch.rows[:, None]
            return cls(like, fields, own, masks, batch.counts[:, None], torch.arange(count), count)
        mask = batch.mask()
        client = torch.arange(count)[:, None].expand(mask.shape)[mask]
        fields = {n: v[mask][:, None, None] for n, v in batch.fields.items()}
        own = {n: v[client][:, None] for n, v in batch.client_fields.items()}
        return cls(like, fields, own, None, torch.ones(len(client), 1), client, count)

    def distinct(self) -> Units:
        """Return a client's equal rows once, with `times`; units as they are if few rows are equal."""
        if (groups := self._groups([*self.fields])) is None:
            return self
        return replace(self.some(groups.first), times=groups.times)

    def by_moments(self, label: str) -> Units | None:
        """Return rows that differ in a label alone as two, whose labels have their mean and variance.

        Sums over these rows of any function that is a cubic in the label stay what they are, as of a
        Normal log density. None: there are not half as many.
        """
        y = self.fields[label]
        if not y.is_floating_point() or y[:1].numel() != 1:
            return None
        groups = self._groups([name for name in self.fields if name != label])
        if groups is None or 2 * len(groups.times) > FEW_EQUAL * len(y):
            return None
        mean, of, times = torch.zeros(len(groups.times)), groups.of, groups.times
        y = y.flatten()
        mean = mean.index_add(0, of, y) / times
        sd = (torch.zeros(len(times)).index_add(0, of, (y - mean[of]).square()) / times).sqrt()
        at = groups.first.repeat(2)
        order = self.client[at].argsort(stable=True)  # low labels, then high ones, of each client
        units = self.some(at[order])
        labels = torch.cat([mean - sd, mean + sd])[order].view(-1, *self.fields[label].shape[1:])
        halves = (0.5 * times).repeat(2)[order]
        return replace(units, fields={**units.fields, label: labels}, times=halves)

    def _groups(self, names: Sequence[str]) -> EqualRows | None:
        """Return the rows of a client that agree in some fields; None: few do."""
        count = len(self.client)
        rows = [self.fields[name].reshape(count, -1) for name in names]
        if self.masks is not None or sum(v.shape[1] for v in rows) > MOST_COLUMNS:
            return None
        unique, of, times = self.client.unique(return_inverse=True, return_counts=True)
        for column in (v[:, i] for v in rows for i in range(v.shape[1])):
            values, place = column.unique(return_inverse=True)
            unique, of, times = (of * len(values) + place).unique(
                return_inverse=True, return_counts=True
            )
            if len(unique) > FEW_EQUAL * count:
                return None
        first = torch.full((len(unique),), count).scatter_reduce(0, of, torch.arange(count), "amin")
        return EqualRows(of, times.to(self.counts.dtype), first)

    def equal_clients(self) -> tuple[Tensor, Tensor]:
        """Return one client of each set with equal units, (C',), and of every client its set, (C,)."""
        times = () if self.times is None else (self.times,)
        columns = [v.reshape(len(self.client), -1).double() for v in (*self.tensors, *times)]
        table = torch.cat(columns, 1).numpy()
        sizes = torch.bincount(self.client, minlength=self.clients).tolist()
        places: dict[bytes, int] = {}
        some, at = list[int](), list[int]()
        for k, rows in enumerate(np.split(table, np.cumsum(sizes)[:-1])):
            key = rows[np.lexsort(rows.T)].tobytes()
            if key not in places:
                places[key] = len(some)
                some.append(k)
            at.append(places[key])
        return torch.tensor(some), torch.tensor(at)

    def some(self, at: Tensor) -> Units:
        """Return the units at some positions."""
        return replace(
            self,
            fields={n: v[at] for n, v in self.fields.items()},
            client_fields={n: v[at] for n, v in self.client_fields.items()},
            masks=None if self.masks is None else self.masks[at],
            counts=self.counts[at],
            client=self.client[at],
            times=None if self.times is None else self.times[at],
        )

    @property
    def rows(self) -> int:
        """B, the rows of a unit, padded ones included."""
        return max((v.shape[2] for v in self.fields.values()), default=1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, n in front."""
        masks = () if self.masks is None else (self.masks,)
        return (*self.fields.values(), *self.client_fields.values(), *masks, self.counts)

    @cached_property
    def together(self) -> ClientBatch:
        """The batch of all units, each a client."""
        return replace(
            self.like,
            fields={n: v[:, 0] for n, v in self.fields.items()},
            client_fields={n: v[:, 0] for n, v in self.client_fields.items()},
            rows=None if self.masks is None else self.masks[:, 0],
            counts=self.counts[:, 0],
            own_keys=self.like.own_keys.expand(len(self.client), -1),
        )

    def batch(self, own: tuple[Tensor, ...]) -> ClientBatch:
        """Return the batch of one unit, whose tensors are given."""
        first, second = len(self.fields), len(self.fields) + len(self.client_fields)
        return replace(
            self.like,
            fields=dict(zip(self.fields, own[:first], strict=True)),
            client_fields=dict(zip(self.client_fields, own[first:second], strict=True)),
            rows=None if self.masks is None else own[second],
            counts=own[-1],
        )


class UnitScore:
    """The log likelihood of a unit, given s and its predictors, less those at l = 0."""

    def __init__(self, line: Line) -> None:
        self.line, self.reading, self.nodes = line, line.reading, nodes_of(line)
        self.in_vmap = self.reading.program.in_vmap
        self.start = start_of(self.reading).double()
        self.recorded = True  # False: rows take different branches
        self.summed = False  # True: sums stand for rows, by their predictors
        self.graphs: dict[Any, Callable[..., Tensor] | None] = {}
        self.by_row = self._is_product_over_rows()
        self.label_of_normal = self._label_of_normal() if self.by_row else None

    def relies_less(self) -> bool:
        """Take less for granted of what a few rows showed; False: all is as the program has it."""
        if self.recorded:
            self.recorded = False
            return True
        if self.summed or not len(self.line.inside):
            return False
        # as of clamp(eta), whose bounds the few rows did not reach
        self.line, self.graphs = Line(self.reading, self.line.inside[:0]), {}
        self.nodes = nodes_of(self.line)
        self.recorded = True
        return True

    def program(self, shift: Tensor, rest: Tensor, batch: ClientBatch) -> Tensor:
        """Return log p(y | v) of one client, (), at predictors `shift` from l = 0, and at s."""
        size = len(self.line.inside)
        if not size:
            return self.reading.log_likelihood(rest, batch)
        # constant: what rows compute of it alone is no part of a graph
        terms = self.line.terms(torch.zeros(size, dtype=rest.dtype), rest, batch)
        return scores(terms, predictors(terms) + shift).sum()

    def predictors(self, line: Tensor, batch: ClientBatch) -> Tensor:
        """Return the predictors (p,) of one client at l (L,)."""
        return predictors(self.line.terms(line, self.start[self.line.rest], batch))

    def of(self, units: Units, count: int) -> Callable[..., Tensor]:
        """Return the log likelihood of a unit of p = `count` predictors, as `partial_of` does."""
        program = partial_of(self, units)
        if not self.recorded:
            return program
        key = tuple((v.shape[1:], v.dtype) for v in units.tensors)
        if key not in self.graphs:
            own = [v[0] for v in units.tensors]
            graph = graph_of(program, torch.zeros(count), self.start[self.line.rest], *own)
            agree = graph is not None and self._agree(graph, units, count)
            self.graphs[key] = graph if agree else None
        return self.graphs[key] or program

    def _agree(self, graph: Callable[..., Tensor], units: Units, count: int) -> bool:
        """Return whether graph and program agree on some units, at random points."""
        g = torch.Generator().manual_seed(0)
        rest, program = self.start[self.line.rest], partial_of(self, units)
        last = len(units.client) - 1
        for i in torch.linspace(0, last, min(COMPARED, last + 1)).long().tolist():
            own = [v[i] for v in units.tensors]
            at = torch.randn(count, generator=g), rest + AWAY * torch.randn(len(rest), generator=g)
            if not nearly_equal(graph(*at, *own), program(*at, *own)):
                return False
        return True

    def _label_of_normal(self) -> str | None:
        """Return the field of which Normal rows are all of the likelihood; None: they are not."""
        program = self.reading.program
        if len(program.labels) != 1 or program.factors:
            return None
        site, label = next(iter(program.labels.items()))
        term = self.reading.terms(self.start, in_double(program.prototype))[site]
        return label if kind_of(term["fn"]) == "Normal" else None

    def _is_product_over_rows(self) -> bool:
        """Return whether a client's likelihood is the product of those of its rows, one at a time."""
        program = self.reading.program
        if not self.in_vmap or program.joint:
            return False
        g = torch.Generator().manual_seed(0)
        batch = moved_rows(program, g)
        try:
            units = Units.of(batch, by_row=True)
            v = self.start + AWAY * torch.randn(len(self.start), generator=g)
            each = [
                self.reading.log_likelihood(v, units.batch(tuple(t[i] for t in units.tensors)))
                for i in range(len(units.client))
            ]
            return nearly_equal(torch.stack(each).sum(), self.reading.log_likelihood(v, batch))
        except FAILS:
            return False


def partial_of(score: UnitScore, units: Units) -> Callable[..., Tensor]:
    """Return the program's log likelihood of a unit: (shift, rest, its tensors) -> ()."""
    return lambda shift, rest, *own: score.program(shift, rest, units.batch(own))
