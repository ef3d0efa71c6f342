"""The server of two_stage: gather factors, sample, weight.

Its state is tensors in float64, with clients in the order of their names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hierfl.core.importance_sampling import K_HAT, chosen, normal_points, resampled
from hierfl.core.trees import Tree, tree_map
from hierfl.method import Clock, Reports, Surprise
from hierfl.methods.stacked import stored
from hierfl.methods.two_stage_checks import check_read, failed_of
from hierfl.methods.two_stage_stages import DONE, GATHER, LOGGED, WEIGHT, warn
from hierfl.program.few_rows import double_precision
from hierfl.program.handlers import unchecked
from hierfl.program.program import Params
from hierfl.summaries.exact import explained
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.prior_moments import any_client, mixing_draws, prior_draws
from hierfl.summaries.proposal import fitted
from hierfl.summaries.sampling import Start, bounds_of, one_thread, sample
from hierfl.summaries.surprise import Known, surprises
from hierfl.summaries.surrogate import Surrogate
from hierfl.summaries.weights import (
    apart,
    asked_of,
    everywhere,
    k_hats_of,
    moments,
    smoothed,
    unweighted,
    with_error,
)
from hierfl.summaries.wide_draws import combined, is_heavy, powers_of, raised

# how little means may move, in posterior sds, and sds may change, for the factors to be final
STILL, STILL_SD = 0.1, 0.05
# share of the draws that must be effective under new factors for the draws to be kept
FITTING = 0.3
# clients beyond which fewer draws are weighted, as each costs every client a pass over its rows;
# and the fewest
MANY, FEWEST_WEIGHTED = 500, 1000
ROUGH = 0.1  # sd of the error of a quadratic of z, in nats, with which all draws are weighted
FAR_MANY = 1000  # clients beyond which they weight only as many draws as a quadratic needs
FEWEST, POINTS = 50, 2_000_000  # scouts for each global number and one, and scouts x clients
FEW = 16  # draws of z by which clients locate their mixing variables
AGAIN = 2  # most restarts from weighted draws whose k-hat is high


@dataclass(frozen=True, eq=False)
class Rounds:
    """The server's part of a round."""

    surrogate: Surrogate
    draws: int  # S, of the global sites
    seed: int
    gathers: int | None = None  # rounds of factors without weights; None: until final

    def begin(self) -> Tree:
        """Return the state before the first round."""
        hierarchy = self.surrogate.hierarchy
        program, reading = hierarchy.program, hierarchy.reading
        count, size = program.num_clients, reading.size
        kept = len(reading.origin) + self.surrogate.mixed
        exact = hierarchy.spread is not None
        weighted = min(self.draws, max(FEWEST_WEIGHTED, self.draws * MANY // max(2 * MANY, count)))
        weighted = self.draws if exact else weighted
        asked = weighted if count <= FAR_MANY or kept > self.shared else asked_of(kept, weighted)
        like = program.prototype.client_fields
        with double_precision(), torch.no_grad(), unchecked():
            fields = {
                # before clients answer: a prior may divide by a field, so zeros will not do
                n: like[n][0].expand(count, *like[n].shape[2:]).clone()
                for n in hierarchy.fields
            }
            prior = prior_draws(hierarchy, self.seed)
            # of many clients the posterior is narrow, and each draw costs a pass over all of them
            prior = prior[: max(FEWEST * (1 + self.shared), min(len(prior), POINTS // count))]
            mixing = mixing_draws(hierarchy, prior, self.seed)
            if mixing is not None:
                prior = torch.cat([prior, mixing.repeat(1, count)], 1)
            equal = torch.full((len(prior),), -math.log(len(prior)))
            none = Factors(
                torch.zeros(1, size, size), torch.zeros(1, size), {n: like[n][:, 0] for n in fields}
            )
            belief = {} if exact else self._of_any_client(prior, equal, none)
            return {
                **_nothing(count, weighted, kept),
                "asked": torch.zeros(asked),
                "factors": {
                    "precision": torch.zeros(count, size, size),
                    "shift": torch.zeros(count, size),
                    "fields": fields,
                    **{name: torch.zeros(count) for name in ("num_rows", "square") if exact},
                },
                **belief,
                "scouts": {**unweighted(len(prior), kept), "draws": prior},
                "bounds": bounds_of(self.surrogate, prior),
                **{name: torch.tensor(False) for name in ("sampled", "proposed")},
                "stage": torch.tensor(GATHER),
                "again": torch.tensor(0),
                **{name: torch.tensor(torch.nan) for name in LOGGED},
            }

    def down(self, state: Tree, clock: Clock) -> Tree:
        """Return the message: any client's v, and draws to weight if factors are final."""
        message = self.belief(state)
        if int(state["stage"]) == WEIGHT:
            message["draws"] = state["final"]["draws"][self._asked(state), : self.shared]
        return message

    def _asked(self, state: Tree) -> Tensor:
        """Return which of the final draws clients weight, (A,) int64, evenly among them."""
        count, asked = len(state["final"]["draws"]), len(state["asked"])
        return torch.arange(asked) * (count // asked)

    @property
    def shared(self) -> int:
        """K, the length of z: the first entries of a draw, before the clients' mixing variables."""
        return len(self.surrogate.hierarchy.reading.origin)

    def belief(self, state: Tree) -> Tree:
        """Return mean and covariance of any client's v; with mixed sites also a few draws of z."""
        message = {name: state[name] for name in ("loc", "covariance") if name in state}
        if self.surrogate.mixed:
            scouts = state["scouts"]
            message["few"] = resampled(scouts["draws"], scouts["log_weights"], FEW)[
                :, : self.shared
            ]
        return message

    def update(self, state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        """Return the next state."""
        left, ranks = clock.rounds - clock.round - 1, self.surrogate.hierarchy.program.ranks
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
                state = self.after_weighting(state, reports, clock)
            else:
                check_read(means["misread"])
                state = self.gathered(state, reports, clock)
        warn(state, left)
        return tree_map(lambda v: v.detach().clone(), state)

    def gathered(self, state: Tree, reports: Reports, clock: Clock) -> Tree:
        """Return the state after clients have sent factors."""
        old = state["factors"]
        sent = {name: reports.value[name] for name in old}
        if "square" in sent:
            explains = explained(sent["precision"].double(), sent["shift"].double())
            sent["square"] = sent["square"].double() + explains
        kept = stored(old, Reports(sent, reports.ids))
        factors = Factors(**kept)
        seen = state["seen"].index_fill(0, reports.ids, True)
        state = {**state, "factors": kept, "seen": seen}
        if factors.num_rows is not None:
            return self._integrated(state, factors, clock)
        if bool(state["sampled"]):
            state = self._reweighted(state, factors)
        if self.gathers is not None and clock.round + 1 >= self.gathers:
            ended = self._sampled(state, factors, "final", clock)
            return {**ended, "stage": torch.tensor(DONE), "weighted": torch.ones_like(seen)}
        still = bool(state["moved"] < STILL) and bool(state["changed"] < STILL_SD)
        if not still or self.gathers is not None:
            state = self._sampled(state, factors, "scouts", clock)
        elif bool((seen | state["failed"]).all()):
            state = self._to_weight({**state, "powers": torch.ones(len(seen))}, clock)
        scouts = state["scouts"]
        return {
            **state,
            **self._of_any_client(scouts["draws"], scouts["log_weights"], factors),
        }

    def _of_any_client(self, draws: Tensor, log_weights: Tensor, factors: Factors) -> Tree:
        loc, covariance = any_client(self.surrogate, draws, log_weights, factors)
        return {"loc": loc, "covariance": covariance}

    def _integrated(self, state: Tree, factors: Factors, clock: Clock) -> Tree:
        """Return the state after clients have sent the sums of a Gaussian likelihood: all is known."""
        if not bool((state["seen"] | state["failed"]).all()) and clock.round + 1 < clock.rounds:
            return state
        state = self._sampled(state, factors, "final", clock)
        count = torch.tensor(float(len(state["final"]["draws"])))
        seen = state["seen"]
        ended = bool((seen | state["failed"]).all())
        stage = torch.tensor(DONE if ended else GATHER)
        return {**state, "stage": stage, "weighted": seen.clone(), "effective": count}

    def _to_weight(self, state: Tree, clock: Clock) -> Tree:
        """Return the state with draws from factors raised to `powers`, for clients to weight."""
        if len(state["asked"]) < len(state["final"]["draws"]):
            return self._proposed(state, state["scouts"])
        factors = raised(Factors(**state["factors"]), state["powers"])
        return {**self._sampled(state, factors, "final", clock), **self._asking(state)}

    def _reweighted(self, state: Tree, factors: Factors) -> Tree:
        """Return the state with weights that make the scouts draws given the new factors."""
        scouts = state["scouts"]
        draws, before = scouts["draws"], scouts["log_weights"]
        weights = smoothed(self._log_p(draws, factors) - scouts["log_p"])
        z = draws[:, : self.shared]
        moved, changed = apart(moments(z, before), moments(z, weights.log))
        if weights.effective < FITTING / float(before.exp().square().sum()):
            moved = changed = torch.tensor(torch.inf)
        scouts = {**scouts, "log_weights": weights.log}
        return {**state, "scouts": scouts, "moved": moved, "changed": changed}

    def _sampled(self, state: Tree, factors: Factors, name: str, clock: Clock) -> Tree:
        """Return the state with new draws of the surrogate, as scouts or as the final ones."""
        scouts = state["scouts"]
        start = Start(
            scouts["draws"], scouts["log_weights"], state["bounds"], not bool(state["sampled"])
        )
        found = sample(
            self.surrogate,
            factors,
            len(state[name]["draws"]),
            start,
            final=name == "final",
            seed=self.seed + 7919 * (clock.round + 1),
        )
        log_p = self._log_p(found.draws, factors)
        equal = -math.log(len(log_p))
        drawn = {"draws": found.draws, "log_weights": found.log_weights}
        return {
            **state,
            # the log density that they were drawn from, up to a constant
            name: {**drawn, "log_p": log_p - (found.log_weights - equal)},
            "sampled": torch.tensor(True),
            "r_hat": torch.tensor(found.r_hat),
            **({} if factors.num_rows is None else {"k_hat": torch.tensor(found.k_hat)}),
        }

    def _log_p(self, draws: Tensor, factors: Factors) -> Tensor:
        """Return the log density of the surrogate at draws of z, (S,)."""
        log_z, marginals = self.surrogate.log_marginals(draws, factors)
        return log_z + marginals.sum(1)

    def after_weighting(self, state: Tree, reports: Reports, clock: Clock) -> Tree:
        """Return the state after clients have sent log ratios of likelihoods and factors."""
        factors, final = Factors(**state["factors"]), state["final"]
        left = clock.rounds - clock.round - 1
        new = ~state["weighted"][reports.ids]
        ids, each = reports.ids[new], reports.value[new].mT.double()  # (A, n)
        asked = state["asked"] + each.sum(1)
        base = self._wider(state, factors)
        ratios, error = everywhere(
            asked, self._asked(state), final["draws"][:, : self.shared], base
        )
        seen = state["weighted"].index_fill(0, ids, True)
        k_hats = k_hats_of(each)
        weights = smoothed(ratios + base)
        inner = state["inner_error"]
        state = {
            **state,
            "asked": asked,
            "ratios": ratios,
            "inner_error": inner.nan_to_num().square().add(error**2).sqrt() if error else inner,
            "weighted": seen,
            "heavy": state["heavy"].index_copy(0, ids, is_heavy(k_hats, each)),
            "k_hat_client": torch.cat([state["k_hat_client"][None].nan_to_num(), k_hats]).max(),
            "k_hat": torch.tensor(weights.k_hat),
            "effective": torch.tensor(weights.effective),
        }
        complete = bool((seen | state["failed"]).all())
        if not complete and left > 0:
            return state
        state = {**state, "final": {**final, "log_weights": weights.log}}
        if not complete:
            return state
        if bool((state["powers"] < 1.0).any()):
            # a client that failed once would count in a part of the draws
            equal = bool((seen == state["narrow"]["weighted"]).all())
            state = self._together(state, factors) if equal else state
            return {**state, "stage": torch.tensor(DONE)}
        far = weights.k_hat >= K_HAT or weights.effective < FITTING * len(ratios)
        if error > ROUGH and left > 0:  # a quadratic will not do
            return {**state, **self._asking(state), "asked": torch.zeros_like(ratios)}
        if bool(state["proposed"]) and far and int(state["again"]) < AGAIN and left > 0:
            return self._proposed({**state, "again": state["again"] + 1}, state["final"])
        if bool(state["heavy"].any()) and left > 0 and not bool(state["proposed"]):
            return self._widened(state, factors, clock)
        if weights.k_hat >= K_HAT and int(state["again"]) < AGAIN and left > 1:
            return self._from_weighted(state, factors)
        return {**state, "stage": torch.tensor(DONE)}

    def _wider(self, state: Tree, factors: Factors) -> Tensor:
        """Return the surrogate's log density minus that which the draws are from, (S,)."""
        final, powers = state["final"], state["powers"]
        if bool((powers == 1.0).all()) and not bool(state["proposed"]):
            return torch.zeros(len(final["draws"]))
        return self._log_p(final["draws"], factors) - final["log_p"]

    def _proposed(self, state: Tree, known: Tree) -> Tree:
        """Return the state with draws about known weighted ones, for clients to weight.

        The small errors of very many factors add up to more than the width of the posterior, so
        that draws need not be those of the surrogate.
        """
        count, size = state["final"]["draws"].shape
        proposal = fitted(known["draws"], known["log_weights"].exp())
        draws, log_q = proposal.at(normal_points(count, size + 1, seed=self.seed))
        drawn = {**unweighted(count, size), "draws": draws, "log_p": log_q}
        proposed = {"proposed": torch.tensor(True), "final": drawn}
        return {**state, **self._asking(state), **proposed}

    def _asking(self, state: Tree) -> Tree:
        """Return the part of the state of draws that nobody has weighted yet."""
        none = torch.zeros_like(state["weighted"])
        return {
            "stage": torch.tensor(WEIGHT),
            **{name: none.clone() for name in ("weighted", "heavy", "failed")},
            "asked": torch.zeros_like(state["asked"]),
            "ratios": torch.zeros_like(state["ratios"]),
            "inner_error": torch.tensor(torch.nan),
        }

    def _widened(self, state: Tree, factors: Factors, clock: Clock) -> Tree:
        """Return the state with wider draws, as some clients' weights are heavy-tailed."""
        final = state["final"]
        powers = powers_of(
            state["heavy"],
            final["log_weights"],
            final["log_p"],
            lambda powers: self._log_p(final["draws"], raised(factors, powers)),
        )
        log_target = state["ratios"] + final["log_p"]
        narrow = {"draws": final["draws"], "log_target": log_target, "weighted": state["weighted"]}
        return self._to_weight({**state, "powers": powers, "narrow": narrow}, clock)

    def _together(self, state: Tree, factors: Factors) -> Tree:
        """Return the state with equally weighted draws of the first and the wider set."""
        narrow, wide = state["narrow"], state["final"]
        draws = torch.cat([narrow["draws"], wide["draws"]])
        first = self._log_p(draws, factors)
        second = self._log_p(draws, raised(factors, state["powers"]))
        ratios = torch.cat([narrow["log_target"] - first[: len(wide["draws"])], state["ratios"]])
        weights = smoothed(combined(first, second, ratios + first))
        at = chosen(weights.log, len(wide["draws"]))
        final = {**unweighted(*draws[at].shape), "draws": draws[at], "log_p": first[at]}
        return {
            **state,
            "final": final,
            "ratios": ratios[at],
            "k_hat": torch.tensor(weights.k_hat),
            "effective": torch.tensor(weights.effective),
        }

    def _from_weighted(self, state: Tree, factors: Factors) -> Tree:
        """Return the state that re-collects factors around the weighted draws."""
        final = state["final"]
        kept = resampled(final["draws"], final["log_weights"], len(state["scouts"]["draws"]))
        scouts = {**unweighted(*kept.shape), "draws": kept, "log_p": self._log_p(kept, factors)}
        nan = torch.tensor(torch.nan)
        return {
            **state,
            "scouts": scouts,
            **self._of_any_client(kept, scouts["log_weights"], factors),
            "stage": torch.tensor(GATHER),
            "again": state["again"] + 1,
            **dict.fromkeys(("moved", "changed", "k_hat_client"), nan),
        }

    def surprise(self, state: Tree) -> Surprise | None:
        """Return how surprising each client's factor is given the others', when all is done."""
        if int(state["stage"]) != DONE:
            return None
        with double_precision(), one_thread(), torch.no_grad(), unchecked():
            factors, draws = Factors(**state["factors"]), state["final"]["draws"]
            if bool((state["powers"] < 1.0).any() | state["proposed"]):
                weights = state["final"]["log_weights"] - state["ratios"]
                draws = resampled(draws, weights.log_softmax(0), len(draws))
            found = surprises(Known(self.surrogate, factors, draws, state["bounds"], self.seed))
            return Surprise(*(v[self.surrogate.hierarchy.program.ranks] for v in found))

    def params(self, state: Tree) -> Params:
        """Return the guide's params: draws of equal weight."""
        known = state["final"] if int(state["stage"]) != GATHER else state["scouts"]
        points = resampled(known["draws"], known["log_weights"], self.draws)[:, : self.shared]
        return {"_shared.points": points.to(torch.get_default_dtype())}


def _nothing(count: int, weighted: int, kept: int) -> Tree:
    """Return what the server has of N clients, and of the draws to weight (S, K), at first."""
    none = torch.zeros(count, dtype=torch.bool)
    return {
        **{name: none.clone() for name in ("seen", "weighted", "heavy", "failed")},
        "final": unweighted(weighted, kept),
        "ratios": torch.zeros(weighted),
        "powers": torch.ones(count),
        "narrow": {
            "draws": torch.zeros(weighted, kept),
            "log_target": torch.zeros(weighted),
            "weighted": none.clone(),
        },
    }
