"""Clients of many rows in two_stage: their log likelihoods' polynomials in the place of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.summaries.expansion import (
    LEAST_ROWS,
    Expansion,
    error_at_draws,
    expanded,
    factors_by,
    is_quiet,
    is_right,
)
from hierfl.summaries.factor import Factor, factor_of
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.packed_rows import PackedRows
from hierfl.summaries.quartic import Quartic
from hierfl.summaries.reading import Nodes
from hierfl.summaries.weighing import Ratios, ratios_of

Rows = Callable[[], PackedRows]  # of a chunk of clients, packed when they are first needed
Belief = tuple[Tensor, Tensor]
FITS = "fits"  # name of what says that a client's polynomial stands for its rows


def shapes_of(size: int, coefficients: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a client's polynomial, V = `size`, with P coefficients; none of 0."""
    return {"center": (size,), "terms": (coefficients,)} if coefficients else {}


@dataclass(frozen=True, eq=False)
class Polynomials:
    """What clients do by polynomials where these stand for their rows, and by rows elsewhere."""

    hierarchy: Hierarchy
    nodes: Nodes
    coefficients: int  # P; 0: all is done by rows

    def factors(
        self, rows: Rows, batch: ClientBatch, belief: Belief, before: Factor, work: Tree
    ) -> tuple[Factor, Tree]:
        """Return clients' factors, and their polynomials with whether these stand for the rows."""
        seen = work["seen"] > 0.0
        if not self.coefficients:
            return factor_of(rows(), belief, self.nodes, before, seen), {}
        prior = torch.linalg.inv_ex(belief[1]).inverse
        of_prior = belief[0], 0.5 * (prior + prior.mT)
        kept, fits = self._kept(work), torch.zeros_like(seen)
        found = Factor(*(torch.zeros_like(v) for v in before))

        def put(who: Tensor, own: Factor) -> None:
            for whole, part in zip(found, own, strict=True):
                whole[who] = part

        who = kept.fits.nonzero()[:, 0]
        if len(who):
            quartic, old = kept.quartic.some(who), Factor(*(v[who] for v in before))
            every = torch.ones(len(who), dtype=torch.bool)
            put(who, own := factor_of(quartic, belief, self.nodes, old, every))
            fits[who] = is_quiet(quartic, of_prior, own)
        large = (batch.counts >= LEAST_ROWS) & ~fits
        if bool(large.any()):  # of rows that differ
            large = large & (rows().sizes >= LEAST_ROWS)
        who = large.nonzero()[:, 0]
        if len(who):
            new = expanded(rows().some(who), of_prior)
            for whole, part in zip(kept.quartic, new.quartic, strict=True):
                whole[who] = part
            own, fits[who] = factors_by(new, of_prior, self.nodes)
            put(who, own)
        who = (~fits).nonzero()[:, 0]
        if len(who):
            old = Factor(*(v[who] for v in before))
            put(who, factor_of(rows().some(who), belief, self.nodes, old, seen[who]))
        return found, {**kept.quartic._asdict(), FITS: fits.to(kept.quartic.terms.dtype)}

    def _kept(self, work: Tree) -> Expansion:
        return Expansion(Quartic(work["center"].clone(), work["terms"].clone()), work[FITS] > 0.0)

    def ratios(
        self, rows: Rows, work: Tree, draws: Tensor, how: Callable[[Tensor], Tree]
    ) -> tuple[Ratios, Tree]:
        """Return clients' log ratios at draws of z, (S, K), and which polynomials stand for the rows.

        `how` gives other arguments of `ratios_of`, of clients at some positions.
        """
        weigh = partial(ratios_of, self.hierarchy, draws=draws)
        count = len(work["precision"])
        if not self.coefficients or not bool((work[FITS] > 0.0).any()):
            every = torch.arange(count)
            return weigh(rows(), **how(every)), {}
        kept = self._kept(work)
        fits, who = kept.fits.clone(), kept.fits.nonzero()[:, 0]
        own, quartic = how(who), kept.quartic.some(who)
        where = own["fields"], own["factor"]
        error = error_at_draws(self.hierarchy, rows().some(who), quartic, where, draws)
        fits[who] = is_right(error, self.hierarchy.program.num_clients)
        whole = Ratios(*torch.zeros(2, count, len(draws)))
        for by, who in ((kept.quartic, fits), (None, ~fits)):
            who = who.nonzero()[:, 0]
            if len(who):
                some = rows().some(who) if by is None else by.some(who)
                for of, part in zip(whole, weigh(some, **how(who)), strict=True):
                    of[who] = part
        return whole, {FITS: fits.to(kept.quartic.terms.dtype)}

    def wide(self, rows: Rows, belief: Belief, before: Factor, work: Tree, steps: int) -> Factor:
        """Return factors about a wide belief, by a few steps."""
        none, count = torch.zeros(len(before.shift), dtype=torch.bool), len(before.shift)
        fits = work[FITS] > 0.0 if self.coefficients else none
        found = Factor(*(torch.zeros_like(v) for v in before))
        for flag in (fits, ~fits):
            who = flag.nonzero()[:, 0]
            if not len(who):
                continue
            by = self._kept(work).quartic if flag is fits else rows()
            some = by if len(who) == count else by.some(who)
            old = Factor(*(v[who] for v in before))
            own = factor_of(some, belief, self.nodes, old, ~none[who], steps=steps)
            for whole, part in zip(found, own, strict=True):
                whole[who] = part
        return found
