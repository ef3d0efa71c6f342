"""The server of two_stage for Gaussian likelihoods whose noise scale is a client's own.

Clients send the sums of their rows, once. As these say all that the rows do, the server then goes
through the rounds of two_stage by itself, with the sums in the place of clients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from hierfl.core import noise
from hierfl.core.gaussians import Factor, rounded
from hierfl.core.trees import tree_map
from hierfl.method import Clock, Reports
from hierfl.methods.stages.client import RowWork
from hierfl.methods.stages.server import Rounds
from hierfl.methods.stages.state import GATHER, ServerState, TwoStageClientState, TwoStageWork
from hierfl.summaries.exact import SUMS, SummedRows, Sums
from hierfl.summaries.factor import factor_of
from hierfl.summaries.weighing import is_sampled

MOST_TURNS = 60  # of the server with itself; it stops earlier


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundsOfSums(Rounds):
    """The server's part of a round, and what clients would do after it."""

    client: RowWork  # whose score reads no rows here

    def begin(self) -> ServerState:
        """Return the state before the first round."""
        state = super().begin()
        factors, zeros = state.factors, torch.zeros(len(state.seen), dtype=torch.float64)
        sums = {
            "precision": torch.zeros_like(factors.precision),
            "shift": torch.zeros_like(factors.shift),
            **{name: zeros.clone() for name in SUMS},
        }
        return replace(state, factors=replace(factors, sums=sums))

    def gathered(self, state: ServerState, reports: Reports, clock: Clock) -> ServerState:
        """Return the state after clients have sent sums; all is known once every client has."""
        sent, sums = reports.value, state.factors.sums or {}
        new = {
            "sums": {name: sent[name] for name in sums},
            "fields": {name: sent["fields"][name] for name in state.factors.fields},
        }
        state = self.with_sent(state, new, reports)
        return self.played(state) if state.all_seen or clock.round + 1 >= clock.rounds else state

    def played(self, state: ServerState) -> ServerState:
        """Return the state after all rounds, by the sums of the clients that have sent some."""
        client, seen, factors = self.client, state.seen, state.factors
        assert client.spread is not None and factors.sums is not None
        count = len(seen)
        sums = Sums(**factors.sums, wrong=torch.zeros(count))
        rows = SummedRows(client.score, client.spread, sums)
        every = torch.arange(count)
        keys = noise.fold(noise.root_key(self.work.seed).expand(count, 2), every)
        own: TwoStageClientState = tree_map(lambda v: torch.zeros(count, *v.shape), client.nothing)
        fields = factors.fields
        flags: dict[str, Any] = {
            name: torch.zeros_like(seen) for name in ("failed", "seen", "weighted")
        }
        state = replace(state.at(GATHER), **flags)
        for turn in range(MOST_TURNS):
            if state.is_done:
                break
            clock = Clock(turn, MOST_TURNS)
            message = self.down(state, clock)
            if state.weights:
                work = TwoStageWork(own, fields, {})
                own, _, sent = client.weighted(lambda: rows, keys, message, work)
                reports = Reports(sent["log_ratios"], every)
                inner = sent["inner"].mean() if is_sampled(client.hierarchy) else None
                state = state.with_inner_error(reports, inner)
                state = self.work.after_weighting(state, reports, clock)
                continue
            before = Factor(own.precision, own.shift, torch.zeros(count))
            belief = message["loc"], message["covariance"]
            is_later = torch.full((count,), turn > 0)
            factor = rounded(
                factor_of(rows, belief, client.score.nodes, before, is_later), belief[1]
            )
            own = own._replace(precision=factor.precision, shift=factor.shift)
            own = own._replace(**client.proposals(message, fields, own))
            sent = {**vars(factors), "precision": factor.precision, "shift": factor.shift}
            state = replace(state, raised=factor.raised.mean())
            state = super().gathered(state, Reports(sent, every), clock)
        return replace(state, seen=seen, weighted=seen.clone(), failed=~seen)
