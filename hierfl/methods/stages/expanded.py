"""Clients of many rows in two_stage: their log likelihoods' polynomials in the place of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hierfl.core.gaussians import Factor
from hierfl.data.batch import ClientBatch
from hierfl.methods.stages.state import TwoStageClientState
from hierfl.summaries.expansion import (
    LEAST_ROWS,
    MOST_OTHERS,
    ClientPolynomials,
    error_at_draws,
    expanded,
    factors_by,
    is_quiet,
    is_right,
)
from hierfl.summaries.factor import factor_of
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.packed_rows import PackedRows
from hierfl.summaries.quartic import Quartic
from hierfl.summaries.units import UnitScore
from hierfl.summaries.weighing import Ratios, ratios_of

Rows = Callable[[], PackedRows]  # of a chunk of clients, packed when they are first needed
Belief = tuple[Tensor, Tensor]
# draws at which a client of many rows is weighted first: more where it is not flat there
FIRST = 64


@dataclass(frozen=True, eq=False)
class Polynomials:
    """What clients do by polynomials where these stand for their rows, and by rows elsewhere."""

    hierarchy: Hierarchy
    score: UnitScore
    coefficients: int  # P; 0: all is done by rows

    def factors(
        self,
        rows: Rows,
        batch: ClientBatch,
        belief: Belief,
        before: Factor,
        state: TwoStageClientState,
    ) -> tuple[Factor, TwoStageClientState]:
        """Return clients' factors, and their states with polynomials and whether these stand for the rows."""
        seen = state.seen > 0.0
        if not self.coefficients or len(self.score.line.rest) > MOST_OTHERS:
            return factor_of(rows(), belief, self.score.nodes, before, seen), state
        prior = torch.linalg.inv_ex(belief[1]).inverse
        of_prior = belief[0], 0.5 * (prior + prior.mT)
        stored, fits = _stored(state), torch.zeros_like(seen)
        factors = Factor(*(torch.zeros_like(v) for v in before))

        who = stored.fits.nonzero()[:, 0]
        if len(who):
            quartic, old = stored.quartic.some(who), Factor(*(v[who] for v in before))
            every = torch.ones(len(who), dtype=torch.bool)
            _put(factors, who, own := factor_of(quartic, belief, self.score.nodes, old, every))
            fits[who] = is_quiet(quartic, of_prior, own)
        large = (batch.counts >= LEAST_ROWS) & ~fits
        if bool(large.any()):  # of rows that differ
            large = large & (rows().sizes >= LEAST_ROWS)
        who = large.nonzero()[:, 0]
        if len(who):
            new = expanded(rows().some(who), of_prior)
            _put(stored.quartic, who, new.quartic)
            own, fits[who] = factors_by(new, of_prior, self.score.nodes)
            _put(factors, who, own)
        who = (~fits).nonzero()[:, 0]
        if len(who):
            old = Factor(*(v[who] for v in before))
            new_of_rows = factor_of(rows().some(who), belief, self.score.nodes, old, seen[who])
            _put(factors, who, new_of_rows)
        flags = fits.to(stored.quartic.terms.dtype)
        return factors, state._replace(**stored.quartic._asdict(), fits=flags)

    def ratios(
        self,
        rows: Rows,
        state: TwoStageClientState,
        draws: Tensor,
        how: Callable[[Tensor], dict[str, Any]],
    ) -> tuple[Ratios, TwoStageClientState]:
        """Return clients' log ratios at draws of z, (S, K), and states with which polynomials stand for rows.

        `how` gives other arguments of `ratios_of`, of clients at some positions.
        """
        weigh = partial(ratios_of, self.hierarchy)
        count = len(state.precision)
        whole = Ratios(*torch.zeros(2, count, len(draws)))
        pending = torch.ones(count, dtype=torch.bool)

        def put(who: Tensor, some: Ratios) -> None:
            pending[who] = False
            _put(whole, who, some)

        if self.coefficients:
            who = self._right(rows, state, draws, how)
            if len(who):
                put(who, weigh(_stored(state).quartic.some(who), draws=draws, **how(who)))
            state = state._replace(fits=(~pending).to(state.fits.dtype))
        if bool(pending.any()) and len(draws) > 2 * FIRST:
            large = pending & (rows().sizes >= LEAST_ROWS)
            if len(who := large.nonzero()[:, 0]):
                some = weigh(rows().some(who), draws=draws[:: len(draws) // FIRST], **how(who))
                flat = is_right(some.log.std(1), self.hierarchy.program.num_clients)
                level = some.log[flat].mean(1, keepdim=True).expand(-1, len(draws))
                put(who[flat], Ratios(level, torch.zeros_like(level)))
        if len(who := pending.nonzero()[:, 0]):
            put(who, weigh(rows().some(who), draws=draws, **how(who)))
        return whole, state

    def _right(
        self,
        rows: Rows,
        state: TwoStageClientState,
        draws: Tensor,
        how: Callable[[Tensor], dict[str, Any]],
    ) -> Tensor:
        """Return positions of clients whose polynomials are right at draws of z, by rows at some."""
        who = (state.fits > 0.0).nonzero()[:, 0]
        if not len(who):
            return who
        own, quartic = how(who), _stored(state).quartic.some(who)
        where = own["fields"], own["factor"]
        error = error_at_draws(self.hierarchy, rows().some(who), quartic, where, draws)
        return who[is_right(error, self.hierarchy.program.num_clients)]

    def wide(
        self, rows: Rows, belief: Belief, before: Factor, state: TwoStageClientState, steps: int
    ) -> Factor:
        """Return factors about a wide belief, by a few steps."""
        none, count = torch.zeros(len(before.shift), dtype=torch.bool), len(before.shift)
        fits = state.fits > 0.0 if self.coefficients else none
        factors = Factor(*(torch.zeros_like(v) for v in before))
        for flag in (fits, ~fits):
            who = flag.nonzero()[:, 0]
            if not len(who):
                continue
            by = _stored(state).quartic if flag is fits else rows()
            some = by if len(who) == count else by.some(who)
            old = Factor(*(v[who] for v in before))
            _put(
                factors,
                who,
                factor_of(some, belief, self.score.nodes, old, ~none[who], steps=steps),
            )
        return factors


def _put(whole: Iterable[Tensor], who: Tensor, parts: Iterable[Tensor]) -> None:
    """Write clients' parts into the tensors of all clients."""
    for of, part in zip(whole, parts, strict=True):
        of[who] = part


def _stored(state: TwoStageClientState) -> ClientPolynomials:
    """Return copies of clients' polynomials, and which of them stand for the rows."""
    quartic = Quartic(state.center.clone(), state.terms.clone())
    return ClientPolynomials(quartic, state.fits > 0.0)
