"""The server of two_stage; its state is float64, with clients in the order of their names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hierfl.core.process import double_precision
from hierfl.core.trees import Tree, copied, tree_map, with_rows
from hierfl.method import Clock, Reports, Surprise, WeightedDraws
from hierfl.methods.stages.anchored import (
    anchor_of,
    begun,
    is_anchored,
    is_far,
    stepped,
)
from hierfl.methods.stages.checks import STILL, STILL_SD, check_read, warn_of
from hierfl.methods.stages.state import (
    DONE,
    GATHER,
    LOGGED,
    OF_CLIENTS,
    Attempt,
    ServerState,
)
from hierfl.methods.stages.weighting import FITTING, Weighting
from hierfl.program.handlers import unchecked
from hierfl.program.program import Params
from hierfl.summaries.exact import explained
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.sampling import bounds_of, one_thread
from hierfl.summaries.surprise import Known, surprises
from hierfl.summaries.surrogate import mixing_draws, prior_draws
from hierfl.summaries.weights import Points, apart, asked_of, moments, smoothed

# clients beyond which fewer draws are weighted, as each is a pass over all rows; the fewest
MANY, FEWEST_WEIGHTED = 500, 1000
# clients beyond which they weight only as many draws as a quadratic needs
FAR_MANY = 1000
# rows of a client, with fewer of which the slope of a likelihood that is not Gaussian is too skewed for
# the tail probability of a Normal, as of two events where 0.2 are expected
ROWS_COMPARED = 20
FEWEST, POINTS = 50, 2_000_000  # scouts for each global number and one, and scouts x clients
FEW = 16  # draws of z by which clients locate their mixing variables
MOST_KEPT = 10_000_000  # single log ratios, clients x draws; of more only the sums are kept


@dataclass(frozen=True, eq=False)
class Rounds:
    """The server's part of a round."""

    work: Weighting
    draws: int  # S, of the global sites
    gathers: int | None = None  # rounds of factors without weights; None: until final

    def begin(self) -> ServerState:
        """Return the state before the first round."""
        work, hierarchy = self.work, self.work.surrogate.hierarchy
        count, size_of_draw = hierarchy.program.num_clients, work.shared + work.surrogate.mixed
        exact = hierarchy.spread is not None
        weighted = max(FEWEST_WEIGHTED, self.draws * MANY // max(2 * MANY, count))
        weighted = self.draws if exact else min(self.draws, weighted)
        # rows whose own sites are integrated at each draw take long
        is_fast = count <= FAR_MANY and hierarchy.program.row_sites is None
        all_asked = is_fast or work.surrogate.mixed
        asked = weighted if all_asked else asked_of(size_of_draw, weighted)
        single = count * (not exact and self.gathers is None and asked * count <= MOST_KEPT)
        with double_precision(), torch.no_grad(), unchecked():
            scouts = Points.equal(self._prior(count))
            belief = None if exact else work.of_any_client(scouts, self._no_factors(1))
            nothing = _nothing(weighted, size_of_draw, torch.zeros(asked, single), count)
            first: dict[str, Any] = dict(vars(nothing))
            first |= {name: torch.tensor(torch.nan) for name in LOGGED}
            first |= {name: torch.zeros(count, dtype=torch.bool) for name in OF_CLIENTS}
            state = ServerState(
                stage=torch.tensor(GATHER),
                factors=self._no_factors(count, exact=exact),
                scouts=scouts,
                bounds=bounds_of(work.surrogate, scouts.draws),
                **first,
                asked=torch.zeros(asked),
                before=nothing,
                again=torch.tensor(0),
                sampled=torch.tensor(False),
                chained=torch.tensor(False),
                share=torch.tensor(1.0),
                raised=torch.tensor(0.0),
                apart=torch.tensor(0.0),
                belief=belief,
                anchor=None
                if belief is None or self.gathers
                else anchor_of(hierarchy, belief.covariance),
            )
            return copied(state)

    def _no_factors(self, count: int, *, exact: bool = False) -> Factors:
        """Return the factors of clients that have not answered."""
        hierarchy = self.work.surrogate.hierarchy
        size, like = hierarchy.reading.size, hierarchy.program.prototype.client_fields
        return Factors(
            torch.zeros(count, size, size),
            torch.zeros(count, size),
            # a prior may divide by a field, so zeros will not do
            {n: like[n][0].expand(count, *like[n].shape[2:]).clone() for n in hierarchy.fields},
            num_rows=torch.zeros(count) if exact else None,
            square=torch.zeros(count) if exact else None,
        )

    def _prior(self, count: int) -> Tensor:
        """Return draws of z and of any client's t from the prior."""
        hierarchy, seed = self.work.surrogate.hierarchy, self.work.seed
        prior = prior_draws(hierarchy, seed)
        # of many clients the posterior is narrow, and each draw costs a pass over all of them
        many = min(len(prior), POINTS // self.work.surrogate.work)
        prior = prior[: max(FEWEST * (1 + self.work.shared), many)]
        return torch.cat([prior, mixing_draws(hierarchy, prior, seed).repeat(1, count)], 1)

    def down(self, state: ServerState, clock: Clock) -> Tree:
        """Return the message: any client's v, and draws to weight if factors are final."""
        message = self.belief(state)
        if state.weights:
            message["draws"] = state.final.draws[self.work.asked(state), : self.work.shared]
        if bool(state.chained):  # draws of the posterior, which no ratio weights
            message["rough"] = state.chained
        return message

    def belief(self, state: ServerState) -> Tree:
        """Return mean and covariance of any client's v; with mixed sites also a few draws of z."""
        message = {} if state.belief is None else dict(vars(state.belief))
        if self.work.surrogate.mixed:
            message["few"] = state.scouts.resampled(FEW)[:, : self.work.shared]
        return message

    def update(self, state: ServerState, means: dict[str, Tree], clock: Clock) -> ServerState:
        """Return the next state."""
        ranks = self.work.surrogate.hierarchy.program.ranks
        reports = means["log_ratios" if state.weights else "factor"]
        # by name: draws do not depend on the order in which clients are given
        places, order = ranks[reports.ids].sort()
        reports = Reports(tree_map(lambda v: v[order], reports.value), places)
        failed_ids = ranks[torch.tensor(clock.left_out, dtype=torch.long)]
        state = state.with_failed(reports, failed_ids)
        with double_precision(), one_thread(), torch.no_grad(), unchecked():
            if state.weights:
                state = state.with_inner_error(reports, means.get("inner_variance"))
                state = self.work.after_weighting(state, reports, clock)
            else:
                check_read(means["misread"])
                state = replace(state, raised=torch.as_tensor(means["raised"]).double())
                state = self.gathered(state, reports, clock)
        warn_of(state, clock)
        return copied(state)

    def gathered(self, state: ServerState, reports: Reports, clock: Clock) -> ServerState:
        """Return the state after clients have sent factors."""
        factors = vars(state.factors).items()
        sent = {name: reports.value[name] for name, value in factors if value is not None}
        if "square" in sent:
            explains = explained(sent["precision"].double(), sent["shift"].double())
            sent["square"] = sent["square"].double() + explains
        state = self.with_sent(state, sent, reports)
        if state.factors.num_rows is not None:
            return self._integrated(state, clock)
        if bool(state.chained):  # the draws are there: clients locate their own scalars by them
            return state.asking()
        if is_anchored(state):
            return self._anchored(state, clock)
        before = state
        if bool(state.sampled):
            state = self._reweighted(state)
        if self.gathers is not None and clock.round + 1 >= self.gathers:
            ended = self.work.with_final(state, clock)
            return replace(ended.at(DONE), weighted=torch.ones_like(state.seen))
        still = bool(state.moved < STILL) and bool(state.changed < STILL_SD)
        if not still or self.gathers is not None:
            state = self.work.with_scouts(state, clock)
        elif state.all_seen:
            state = self.work.to_weight(self._with_all_draws(state), clock)
        belief = self.work.of_any_client(state.scouts, state.factors)
        if is_far(self.work.surrogate.hierarchy, before, belief):
            return begun(before)
        return replace(state, belief=belief)

    def _anchored(self, state: ServerState, clock: Clock) -> ServerState:
        """Return the state after a small step (`two_stage_anchored`)."""
        assert state.anchor is not None
        if not int(state.anchor.step):
            return begun(state)
        state = self.work.with_scouts(state, clock, rough=True)
        belief = self.work.of_any_client(state.scouts, state.factors)
        return stepped(self.work.surrogate.hierarchy, state, belief)

    def _with_all_draws(self, state: ServerState) -> ServerState:
        """Return the state with S draws to weight after small steps: few of them are effective."""
        count, size = state.final.draws.shape
        if not state.was_anchored or len(state.asked) < count or count >= self.draws:
            return state
        each = torch.zeros(self.draws, state.each.shape[1])
        larger = _nothing(self.draws, size, each, len(state.seen))
        asked = torch.zeros(self.draws)
        final, ratios = larger.final, larger.ratios
        return replace(state, final=final, before=larger, ratios=ratios, each=each, asked=asked)

    def with_sent(self, state: ServerState, sent: Tree, reports: Reports) -> ServerState:
        """Return the state with what clients have sent of a part of what is kept of them."""
        seen, old = state.seen.index_fill(0, reports.ids, True), vars(state.factors)
        new = with_rows({name: old[name] for name in sent}, reports.ids, sent)
        return replace(state, factors=replace(state.factors, **new), seen=seen)

    def _integrated(self, state: ServerState, clock: Clock) -> ServerState:
        """Return the state after clients have sent the sums of a Gaussian likelihood: all is known."""
        if not state.all_seen and clock.round + 1 < clock.rounds:
            return state
        state = self.work.with_final(state, clock)
        return state.ended(state.share * len(state.final.draws))

    def _reweighted(self, state: ServerState) -> ServerState:
        """Return the state with weights that make the scouts draws given the new factors."""
        scouts, z = state.scouts, state.scouts.draws[:, : self.work.shared]
        before = scouts.log_weights
        weights = smoothed(self.work.log_p(scouts.draws, state.factors) - scouts.log_p)
        moved, changed = apart(moments(z, before), moments(z, weights.log))
        if weights.effective < FITTING / float(before.exp().square().sum()):
            moved = changed = torch.tensor(torch.inf)
        scouts = replace(scouts, log_weights=weights.log)
        return replace(state, scouts=scouts, moved=moved, changed=changed)

    def surprise(self, state: ServerState) -> Surprise | None:
        """Return how surprising each client's factor is given the others', when all is done."""
        if not state.is_done:
            return None
        with double_precision(), one_thread(), torch.no_grad(), unchecked():
            draws = state.final.draws
            if bool(state.proposed):
                weights = (state.final.log_weights - state.ratios).log_softmax(0)
                draws = replace(state.final, log_weights=weights).resampled(len(draws))
            surrogate, seed = self.work.surrogate, self.work.seed
            p, away, _ = surprises(Known(surrogate, state.factors, draws, state.bounds, seed))
            ranks = surrogate.hierarchy.program.ranks
            least = 1 if surrogate.hierarchy.spread is not None else ROWS_COMPARED
            return Surprise(p[ranks], away[ranks], least)

    def weighted(self, state: ServerState) -> WeightedDraws | None:
        """Return the final draws of the global sites with their weights; None before there are any."""
        if not state.is_done or not bool(state.effective.isfinite()):
            return None
        numbers = (state.share, state.apart, state.inner_error.nan_to_num())
        return WeightedDraws(
            float(state.k_hat),
            float(state.effective),
            state.final.draws[:, : self.work.shared],
            state.final.log_weights,
            *map(float, numbers),
        )

    def params(self, state: ServerState) -> Params:
        """Return the guide's params: draws of equal weight."""
        drawn = state.scouts if int(state.stage) == GATHER else state.final
        points = drawn.resampled(self.draws)[:, : self.work.shared]
        return {"_shared.points": points.to(torch.get_default_dtype())}


def _nothing(draws: int, size: int, each: Tensor, count: int) -> Attempt:
    """Return S draws to weight, (S, K), of which clients have said nothing."""
    return Attempt(
        final=Points.equal(torch.zeros(draws, size)),
        ratios=torch.zeros(draws),
        each=each,
        powers=torch.ones(count),
        proposed=torch.tensor(False),
        k_hat=torch.tensor(0.0),
        effective=torch.tensor(0.0),
    )
