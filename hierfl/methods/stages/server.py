"""The server of two_stage; its state is float64, with clients in the order of their names."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hierfl.core.importance_sampling import resampled
from hierfl.core.trees import Tree, tree_map
from hierfl.method import Clock, Reports, Surprise, WeightedDraws
from hierfl.methods.parts.stacked import stored
from hierfl.methods.stages.anchored import (
    anchor_of,
    begun,
    is_anchored,
    is_far,
    stepped,
    was_anchored,
)
from hierfl.methods.stages.checks import (
    DONE,
    GATHER,
    LOGGED,
    STILL,
    STILL_SD,
    WEIGHT,
    check_read,
    failed_of,
    warn,
)
from hierfl.methods.stages.weighting import FITTING, Weighting
from hierfl.program.few_rows import double_precision
from hierfl.program.handlers import unchecked
from hierfl.program.program import Params
from hierfl.summaries.exact import explained
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.sampling import bounds_of, one_thread
from hierfl.summaries.surprise import Known, surprises
from hierfl.summaries.surrogate import mixing_draws, prior_draws
from hierfl.summaries.weights import apart, asked_of, moments, smoothed, unweighted, with_error

# clients beyond which fewer draws are weighted, as each is a pass over all rows; the fewest
MANY, FEWEST_WEIGHTED = 500, 1000
FAR_MANY = 1000  # clients beyond which they weight only as many draws as a quadratic needs
FEWEST, POINTS = 50, 2_000_000  # scouts for each global number and one, and scouts x clients
FEW = 16  # draws of z by which clients locate their mixing variables
MOST_KEPT = 10_000_000  # single log ratios, clients x draws; of more only the sums are kept


@dataclass(frozen=True, eq=False)
class Rounds:
    """The server's part of a round."""

    work: Weighting
    draws: int  # S, of the global sites
    gathers: int | None = None  # rounds of factors without weights; None: until final

    def begin(self) -> Tree:
        """Return the state before the first round."""
        work, hierarchy = self.work, self.work.surrogate.hierarchy
        program, size = hierarchy.program, hierarchy.reading.size
        count, size_of_draw = program.num_clients, work.shared + work.surrogate.mixed
        exact = hierarchy.spread is not None
        weighted = max(FEWEST_WEIGHTED, self.draws * MANY // max(2 * MANY, count))
        weighted = self.draws if exact else min(self.draws, weighted)
        all_asked = count <= FAR_MANY or work.surrogate.mixed
        asked = weighted if all_asked else asked_of(size_of_draw, weighted)
        single = count * (not exact and self.gathers is None and asked * count <= MOST_KEPT)
        like = program.prototype.client_fields
        with double_precision(), torch.no_grad(), unchecked():
            fields = {
                # before clients answer: a prior may divide by a field, so zeros will not do
                n: like[n][0].expand(count, *like[n].shape[2:]).clone()
                for n in hierarchy.fields
            }
            prior = self._prior(count)
            equal = torch.full((len(prior),), -math.log(len(prior)))
            none = Factors(
                torch.zeros(1, size, size), torch.zeros(1, size), {n: like[n][:, 0] for n in fields}
            )
            belief = {} if exact else work.of_any_client(prior, equal, none)
            return {
                **_nothing(count, weighted, size_of_draw, torch.zeros(asked, single)),
                "asked": torch.zeros(asked),
                "factors": {
                    "precision": torch.zeros(count, size, size),
                    "shift": torch.zeros(count, size),
                    "fields": fields,
                    **{name: torch.zeros(count) for name in ("num_rows", "square") if exact},
                },
                **belief,
                "scouts": {**unweighted(len(prior), size_of_draw), "draws": prior},
                **({} if exact or self.gathers else anchor_of(hierarchy, belief["covariance"])),
                **{name: torch.tensor(0.0) for name in ("raised", "apart")},
                "bounds": bounds_of(work.surrogate, prior),
                **{name: torch.tensor(False) for name in ("sampled", "proposed", "chained")},
                "stage": torch.tensor(GATHER),
                "again": torch.tensor(0),
                **{name: torch.tensor(torch.nan) for name in LOGGED},
            }

    def _prior(self, count: int) -> Tensor:
        """Return draws of z and of any client's t from the prior."""
        hierarchy, seed = self.work.surrogate.hierarchy, self.work.seed
        prior = prior_draws(hierarchy, seed)
        # of many clients the posterior is narrow, and each draw costs a pass over all of them
        prior = prior[: max(FEWEST * (1 + self.work.shared), min(len(prior), POINTS // count))]
        return torch.cat([prior, mixing_draws(hierarchy, prior, seed).repeat(1, count)], 1)

    def down(self, state: Tree, clock: Clock) -> Tree:
        """Return the message: any client's v, and draws to weight if factors are final."""
        message = self.belief(state)
        if int(state["stage"]) == WEIGHT:
            message["draws"] = state["final"]["draws"][self.work.asked(state), : self.work.shared]
        return message

    def belief(self, state: Tree) -> Tree:
        """Return mean and covariance of any client's v; with mixed sites also a few draws of z."""
        message = {name: state[name] for name in ("loc", "covariance") if name in state}
        if self.work.surrogate.mixed:
            message["few"] = self._resampled(state["scouts"], FEW)
        return message

    def _resampled(self, points: Tree, count: int) -> Tensor:
        return resampled(points["draws"], points["log_weights"], count)[:, : self.work.shared]

    def update(self, state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        """Return the next state."""
        ranks = self.work.surrogate.hierarchy.program.ranks
        reports = means["log_ratios" if int(state["stage"]) == WEIGHT else "factor"]
        # by name: draws do not depend on the order in which clients are given
        places, order = ranks[reports.ids].sort()
        reports = Reports(tree_map(lambda v: v[order], reports.value), places)
        lost = ranks[torch.tensor(clock.left_out, dtype=torch.long)]
        clock = clock._replace(left_out=tuple(lost.tolist()))
        state = {**state, "failed": failed_of(state["failed"], reports, clock)}
        with double_precision(), one_thread(), torch.no_grad(), unchecked():
            if int(state["stage"]) == WEIGHT:
                state = with_error(state, reports, means.get("inner_variance"))
                state = self.work.after_weighting(state, reports, clock)
            else:
                check_read(means["misread"])
                state = {**state, "raised": torch.as_tensor(means["raised"]).double()}
                state = self.gathered(state, reports, clock)
        warn(state, clock)
        return tree_map(lambda v: v.detach().clone(), state)

    def gathered(self, state: Tree, reports: Reports, clock: Clock) -> Tree:
        """Return the state after clients have sent factors."""
        old = state["factors"]
        sent = {name: reports.value[name] for name in old}
        if "square" in sent:
            explains = explained(sent["precision"].double(), sent["shift"].double())
            sent["square"] = sent["square"].double() + explains
        stored_factors = stored(old, Reports(sent, reports.ids))
        factors = Factors(**stored_factors)
        seen = state["seen"].index_fill(0, reports.ids, True)
        state = {**state, "factors": stored_factors, "seen": seen}
        if factors.num_rows is not None:
            return self._integrated(state, factors, clock)
        if bool(state["chained"]):  # the draws are there: clients locate their own scalars by them
            return {**state, **self.work.asking(state)}
        if is_anchored(state):
            return self._anchored(state, factors, clock)
        before = state
        if bool(state["sampled"]):
            state = self._reweighted(state, factors)
        if self.gathers is not None and clock.round + 1 >= self.gathers:
            ended = self.work.sampled(state, factors, "final", clock)
            return {**ended, "stage": torch.tensor(DONE), "weighted": torch.ones_like(seen)}
        still = bool(state["moved"] < STILL) and bool(state["changed"] < STILL_SD)
        if not still or self.gathers is not None:
            state = self.work.sampled(state, factors, "scouts", clock)
        elif bool((seen | state["failed"]).all()):
            state = self.work.to_weight(self._with_all_draws(state), clock)
        scouts = state["scouts"]
        belief = self.work.of_any_client(scouts["draws"], scouts["log_weights"], factors)
        if is_far(self.work.surrogate.hierarchy, before, belief):
            return begun(before)
        return {**state, **belief}

    def _anchored(self, state: Tree, factors: Factors, clock: Clock) -> Tree:
        """Return the state after a small step (`two_stage_anchored`)."""
        if not int(state["steps"]):
            return begun(state)
        state = self.work.sampled(state, factors, "scouts", clock, rough=True)
        scouts = state["scouts"]
        belief = self.work.of_any_client(scouts["draws"], scouts["log_weights"], factors)
        return stepped(self.work.surrogate.hierarchy, state, belief)

    def _with_all_draws(self, state: Tree) -> Tree:
        """Return the state with S draws to weight after small steps: few of them are effective."""
        count, weighted = len(state["final"]["draws"]), len(state["asked"])
        if not was_anchored(state) or weighted < count or count >= self.draws:
            return state
        size, single = state["final"]["draws"].shape[1], state["each"].shape[1]
        begun = _nothing(len(state["seen"]), self.draws, size, torch.zeros(self.draws, single))
        larger = {name: begun[name] for name in ("final", "before", "ratios", "each")}
        return {**state, **larger, "asked": torch.zeros(self.draws)}

    def with_sent(self, state: Tree, sent: Tree, reports: Reports) -> Tree:
        """Return the state with what clients have sent of a part of what is kept of them."""
        old, seen = state["factors"], state["seen"].index_fill(0, reports.ids, True)
        stored_parts = stored({name: old[name] for name in sent}, Reports(sent, reports.ids))
        return {**state, "factors": {**old, **stored_parts}, "seen": seen}

    def _integrated(self, state: Tree, factors: Factors, clock: Clock) -> Tree:
        """Return the state after clients have sent the sums of a Gaussian likelihood: all is known."""
        if not bool((state["seen"] | state["failed"]).all()) and clock.round + 1 < clock.rounds:
            return state
        state = self.work.sampled(state, factors, "final", clock)
        count = state["share"] * len(state["final"]["draws"])
        seen = state["seen"]
        ended = bool((seen | state["failed"]).all())
        stage = torch.tensor(DONE if ended else GATHER)
        return {**state, "stage": stage, "weighted": seen.clone(), "effective": count}

    def _reweighted(self, state: Tree, factors: Factors) -> Tree:
        """Return the state with weights that make the scouts draws given the new factors."""
        scouts = state["scouts"]
        draws, before = scouts["draws"], scouts["log_weights"]
        weights = smoothed(self.work.log_p(draws, factors) - scouts["log_p"])
        z = draws[:, : self.work.shared]
        moved, changed = apart(moments(z, before), moments(z, weights.log))
        if weights.effective < FITTING / float(before.exp().square().sum()):
            moved = changed = torch.tensor(torch.inf)
        scouts = {**scouts, "log_weights": weights.log}
        return {**state, "scouts": scouts, "moved": moved, "changed": changed}

    def surprise(self, state: Tree) -> Surprise | None:
        """Return how surprising each client's factor is given the others', when all is done."""
        if int(state["stage"]) != DONE:
            return None
        with double_precision(), one_thread(), torch.no_grad(), unchecked():
            factors, draws = Factors(**state["factors"]), state["final"]["draws"]
            if bool(state["proposed"]):
                weights = state["final"]["log_weights"] - state["ratios"]
                draws = resampled(draws, weights.log_softmax(0), len(draws))
            surrogate, seed = self.work.surrogate, self.work.seed
            measures = surprises(Known(surrogate, factors, draws, state["bounds"], seed))
            return Surprise(*(v[surrogate.hierarchy.program.ranks] for v in measures))

    def weighted(self, state: Tree) -> WeightedDraws | None:
        """Return the final draws of the global sites with their weights; None before there are any."""
        if int(state["stage"]) != DONE or not bool(state["effective"].isfinite()):
            return None
        final, numbers = state["final"], ("k_hat", "effective", "share", "apart")
        k_hat, effective, share, apart = (float(state[name]) for name in numbers)
        z, log_weights = final["draws"][:, : self.work.shared], final["log_weights"]
        error = float(state["inner_error"].nan_to_num())
        return WeightedDraws(k_hat, effective, z, log_weights, share, apart, error)

    def params(self, state: Tree) -> Params:
        """Return the guide's params: draws of equal weight."""
        drawn = state["final"] if int(state["stage"]) != GATHER else state["scouts"]
        points = self._resampled(drawn, self.draws)
        return {"_shared.points": points.to(torch.get_default_dtype())}


def _nothing(count: int, weighted: int, size: int, single: Tensor) -> Tree:
    """Return what the server has of N clients, and of the draws to weight (S, K), at first."""
    none = torch.zeros(count, dtype=torch.bool)
    return {
        **{name: none.clone() for name in ("seen", "weighted", "heavy", "failed")},
        "powers": torch.ones(count),  # of the factors that the final draws are of
        "final": unweighted(weighted, size),
        "before": {  # a proposal about weighted draws, which may fail
            "final": unweighted(weighted, size),
            "ratios": torch.zeros(weighted),
            "each": single,
            "powers": torch.ones(count),
            "proposed": torch.tensor(False),
            **{name: torch.tensor(0.0) for name in ("k_hat", "effective")},
        },
        "ratios": torch.zeros(weighted),
        "each": single.clone(),  # (A, N), or (A, 0) where they are not kept
        "share": torch.tensor(1.0),
    }
