"""Draws of the server of two_stage, and their weights by what clients send of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hierfl.core.importance_sampling import DOUBT, K_HAT, normal_points, resampled, rests_on_few
from hierfl.core.proposal import fitted
from hierfl.core.trees import Tree
from hierfl.method import Clock, Reports
from hierfl.methods.stages.anchored import was_anchored
from hierfl.methods.stages.checks import DONE, GATHER, NOWHERE, OFF, WEIGHT
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.sampling import Start, sample
from hierfl.summaries.surrogate import Surrogate, any_client
from hierfl.summaries.weights import (
    LIGHT,
    error_of_sds,
    everywhere,
    is_heavy,
    k_hats_of,
    moments,
    smoothed,
    tempered,
    unweighted,
)

# share of the draws that must be effective under new factors for the draws to be kept
FITTING = 0.3
PROPOSING = 0.1  # likewise of the draws of a proposal
# share that need not be drawn again, about the weighted draws, and the most numbers of such a draw
ENOUGH, MOST_PROPOSED = 0.25, 12
# powers of a factor that misses a tail of its client's likelihood, the first with light weights
POWERS = (0.7, 0.5, 0.35, 0.25, 0.12, 0.0)
ROUGH = 0.1  # sd of the error of a quadratic of z, in nats, with which all draws are weighted
AGAIN = 2  # most restarts from weighted draws whose k-hat is high
# share of draws that has to be effective, and most restarts, where likelihoods are not log-concave
ENOUGH_OF_ANCHORED, AGAIN_OF_ANCHORED = 0.4, 5
FAR = 3.0  # standard errors by which two sets of draws may differ
COMPARED = 100  # effective draws of each of two sets that are compared
UNSURE_TAILS = 2.0  # times their errors, where the tails of a set rest on few draws


@dataclass(frozen=True, eq=False)
class Weighting:
    """The server's draws."""

    surrogate: Surrogate
    seed: int

    @property
    def shared(self) -> int:
        """K, the length of z: the first entries of a draw, before the clients' mixing variables."""
        return len(self.surrogate.hierarchy.reading.origin)

    def asked(self, state: Tree) -> Tensor:
        """Return which of the final draws clients weight, (A,) int64, evenly among them."""
        count, weighted = len(state["final"]["draws"]), len(state["asked"])
        return torch.arange(weighted) * (count // weighted)

    def of_any_client(self, draws: Tensor, log_weights: Tensor, factors: Factors) -> Tree:
        """Return the part of the state that says what any client's v may be."""
        loc, covariance = any_client(self.surrogate, draws, log_weights, factors)
        return {"loc": loc, "covariance": covariance}

    def to_weight(self, state: Tree, clock: Clock) -> Tree:
        """Return the state with draws of the surrogate for clients to weight."""
        if len(state["asked"]) < len(state["final"]["draws"]):
            return self.proposed(state, state["scouts"])
        drawn = self.sampled(state, Factors(**state["factors"]), "final", clock)
        return {**drawn, **self.asking(state)}

    def sampled(
        self, state: Tree, factors: Factors, name: str, clock: Clock, *, rough: bool = False
    ) -> Tree:
        """Return the state with new draws of the surrogate, as scouts or as the final ones."""
        scouts, proposed = state["scouts"], state["proposed"]
        if name == "final":
            proposed = (state["powers"] < 1.0).any()
            factors = factors.to_powers(state["powers"]) if bool(proposed) else factors
        start = Start(
            scouts["draws"], scouts["log_weights"], state["bounds"], not bool(state["sampled"])
        )
        points = sample(
            self.surrogate,
            factors,
            len(state[name]["draws"]),
            start,
            final=name == "final",
            seed=self.seed + 7919 * (clock.round + 1),
            rough=rough,
        )
        exact, count = factors.num_rows is not None, len(points.draws)
        # of sums nothing is weighted, and the density is not needed
        log_p = torch.zeros(count) if exact else self.log_p(points.draws, factors)
        equal = -math.log(count)
        drawn = {"draws": points.draws, "log_weights": points.log_weights}
        return {
            **state,
            # the log density that they were drawn from, up to a constant
            name: {**drawn, "log_p": log_p - (points.log_weights - equal)},
            "sampled": torch.tensor(True),
            "proposed": proposed,
            "share": torch.tensor(points.share),
            "r_hat": torch.tensor(points.r_hat),
            **({"k_hat": torch.tensor(points.k_hat)} if exact else {}),
        }

    def log_p(self, draws: Tensor, factors: Factors) -> Tensor:
        """Return the log density of the surrogate at draws of z, (S,)."""
        log_z, marginals = self.surrogate.log_marginals(draws, factors)
        return log_z + marginals.sum(1)

    def after_weighting(self, state: Tree, reports: Reports, clock: Clock) -> Tree:
        """Return the state after clients have sent log ratios of likelihoods and factors."""
        factors, final = Factors(**state["factors"]), state["final"]
        rounds_left = clock.rounds - clock.round - 1
        new = ~state["weighted"][reports.ids]
        ids, single = reports.ids[new], reports.value[new].mT.double()  # (A, n)
        total, singles = state["asked"] + single.sum(1), state["each"]
        base, z = self.wider(state, factors), final["draws"][:, : self.shared]
        ratios, error = everywhere(total, self.asked(state), z, base)
        seen = state["weighted"].index_fill(0, ids, True)
        k_hats = k_hats_of(single)
        if bool(state["chained"]):  # the draws are of the posterior itself
            base, error = -ratios, 0.0
            final = {**final, "log_p": self.log_p(final["draws"], factors) + ratios}
        weights = smoothed(ratios + base)
        if not float(total.max()) > 0.5 * NOWHERE:
            weights = weights._replace(k_hat=math.inf, effective=0.0)
        state = {
            **state,
            "asked": total,
            "each": singles.index_copy(1, ids, single) if singles.shape[1] else singles,
            "ratios": ratios,
            "weighted": seen,
            "heavy": state["heavy"].index_copy(0, ids, is_heavy(k_hats, single)),
            "k_hat_client": self._worst(state, k_hats),
            "k_hat": torch.tensor(weights.k_hat),
            "effective": state["share"] * weights.effective,
        }
        complete = bool((seen | state["failed"]).all())
        if not complete and rounds_left > 0:
            return state
        inner = state["inner_error"]
        state = {
            **state,
            "final": {**final, "log_weights": weights.log},
            "inner_error": inner.nan_to_num().hypot(inner.new_tensor(error)) if error else inner,
        }
        return self._after_all(state, factors, error, clock) if complete else state

    def _after_all(self, state: Tree, factors: Factors, error: float, clock: Clock) -> Tree:
        """Return the state once every client has answered: done, or with other draws to weight."""
        if bool(state["chained"]):
            return {**state, "stage": torch.tensor(DONE)}
        rounds_left, count = clock.rounds - clock.round - 1, len(state["ratios"])
        k_hat, effective = float(state["k_hat"]), float(state["effective"])
        again, proposed, before = int(state["again"]), bool(state["proposed"]), state["before"]
        anchored = was_anchored(state)
        enough, restarts = (ENOUGH_OF_ANCHORED, AGAIN_OF_ANCHORED) if anchored else (ENOUGH, AGAIN)
        is_thin, better = effective < enough * count, k_hat < float(before["k_hat"])
        right = not effective < min(float(before["effective"]), ENOUGH * count)
        poor = is_thin or self._rests_on_few(state)
        tries_again = poor and again < restarts
        if proposed:
            state = {**state, "apart": self._apart(state, before)}
        else:
            few_scalars = self.shared <= MOST_PROPOSED
            tries_again = bool(state["heavy"].any()) or ((poor or anchored) and few_scalars)
        worse = not better and effective < float(before["effective"])
        if proposed and (worse or not (right or (better and effective > PROPOSING * count))):
            # it missed more than they did
            before = {**before, "apart": state["apart"]}
            state, k_hat = {**state, **before}, float(before["k_hat"])
            error, tries_again = 0.0, False
        if error > ROUGH and rounds_left > 0:  # a quadratic will not do
            whole = torch.zeros(len(state["ratios"]), state["each"].shape[1])
            return {
                **state,
                **self.asking(state),
                "asked": whole.new_zeros(len(whole)),
                "each": whole,
            }
        if tries_again and rounds_left > 0 and not self.surrogate.mixed:
            many = self.shared > MOST_PROPOSED and state["each"].shape[1] > 0
            if not proposed and many:
                return self._tempered(state, factors, clock)
            return self.proposed({**state, "again": state["again"] + proposed}, state["final"])
        if k_hat >= K_HAT and again < AGAIN and rounds_left > 1:
            return self._from_weighted(state, factors)
        return {**state, "stage": torch.tensor(DONE)}

    def _rests_on_few(self, state: Tree) -> bool:
        """Return whether the tails, or the sd of a global scalar, rest on a few draws."""
        draws, log_weights = (state["final"][name] for name in ("draws", "log_weights"))
        errors = error_of_sds(draws[:, : self.shared], log_weights)
        return rests_on_few(log_weights, float(state["k_hat"])) or not bool((errors <= OFF).all())

    def _apart(self, state: Tree, before: Tree) -> Tensor:
        """Return by how much two sets of weighted draws differ, beyond chance; 0 if one tells little."""
        sets = [(of["final"], float(of["k_hat"]), float(of["effective"])) for of in (state, before)]
        if any(not (k_hat < K_HAT and count >= COMPARED) for _, k_hat, count in sets):
            return torch.tensor(0.0)
        spreads = [self._spread(final, k_hat, count) for final, k_hat, count in sets]
        (mean, sd, error), (other, other_sd, other_error) = spreads
        shift, ratio = ((mean - other) / sd).abs(), (sd / other_sd).log().abs()
        beyond = shift.maximum(ratio) - FAR * error.hypot(other_error)
        return beyond.nan_to_num().max().clamp(min=0.0)

    def _spread(self, final: Tree, k_hat: float, count: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return means and sds of z by weighted draws, (K,), and their relative errors."""
        z, log_weights = final["draws"][:, : self.shared], final["log_weights"]
        # from k-hat 0.5 on errors are larger than weights tell
        unsure = UNSURE_TAILS if k_hat >= DOUBT else 1.0
        return *moments(z, log_weights), unsure * error_of_sds(z, log_weights).clamp(
            min=count**-0.5
        )

    def _worst(self, state: Tree, k_hats: Tensor) -> Tensor:
        """Return the largest k-hat of a client's weights of draws of the surrogate."""
        largest: Tensor = state["k_hat_client"]
        if bool(state["proposed"]) and bool(largest.isfinite()):
            return largest
        return torch.cat([largest[None].nan_to_num(), k_hats]).max()

    def _tempered(self, state: Tree, factors: Factors, clock: Clock) -> Tree:
        """Return the state with draws of a surrogate whose factors reach into clients' tails."""
        final, ids = state["final"], state["heavy"].nonzero()[:, 0]
        z, ratios = final["draws"][self.asked(state)], state["each"][:, ids]
        own, powers = factors.of(ids), torch.ones(len(ids))
        whole, heavy = self.surrogate.log_marginals(z, own)[1], torch.ones(len(ids)) > 0.0
        for power in POWERS:
            powers[heavy] = power
            there = self.surrogate.log_marginals(z, own.to_powers(powers))[1]
            heavy = heavy & (k_hats_of(ratios + whole - there) > LIGHT)
            if not bool(heavy.any()):
                break
        new = {**state, "powers": state["powers"].index_copy(0, ids, powers.to(state["powers"]))}
        before = {name: state[name] for name in state["before"]}
        drawn = self.sampled(new, factors, "final", clock)
        return {**drawn, **self.asking(state), "before": before}

    def wider(self, state: Tree, factors: Factors) -> Tensor:
        """Return the surrogate's log density minus that which the draws are from, (S,)."""
        final = state["final"]
        if not bool(state["proposed"]):
            return torch.zeros(len(final["draws"]))
        s, (low, high) = final["draws"][:, self.surrogate.hierarchy.outside], state["bounds"]
        far = ((s < low) | (s > high)).any(1)  # where scales have no digits left
        return torch.where(far, -torch.inf, self.log_p(final["draws"], factors) - final["log_p"])

    def proposed(self, state: Tree, weighted: Tree) -> Tree:
        """Draw about weighted draws: the errors of very many factors can exceed the posterior's width."""
        count, size = state["final"]["draws"].shape
        proposal = fitted(weighted["draws"], tempered(weighted["log_weights"], PROPOSING))
        draws, log_q = proposal.at(normal_points(count, size + 1, seed=self.seed))
        drawn = {**unweighted(count, size), "draws": draws, "log_p": log_q}
        whole = torch.tensor(1.0)
        proposed: Tree = {"proposed": torch.tensor(True), "final": drawn, "share": whole}
        before = {name: state[name] for name in state["before"]}
        if math.isfinite(float(before["effective"])):
            proposed["before"] = before
        return {**state, **self.asking(state), **proposed}

    def asking(self, state: Tree) -> Tree:
        """Return the part of the state that asks clients to weight the final draws."""
        none = torch.zeros_like(state["weighted"])
        return {
            "stage": torch.tensor(WEIGHT),
            **{name: none.clone() for name in ("weighted", "heavy", "failed")},
            **{name: torch.zeros_like(state[name]) for name in ("asked", "each", "ratios")},
            "inner_error": torch.tensor(torch.nan),
        }

    def _from_weighted(self, state: Tree, factors: Factors) -> Tree:
        """Return the state that re-collects factors around the weighted draws."""
        final = state["final"]
        scout_draws = resampled(final["draws"], final["log_weights"], len(state["scouts"]["draws"]))
        scouts = {
            **unweighted(*scout_draws.shape),
            "draws": scout_draws,
            "log_p": self.log_p(scout_draws, factors),
        }
        nan = torch.tensor(torch.nan)
        return {
            **state,
            "scouts": scouts,
            **self.of_any_client(scout_draws, scouts["log_weights"], factors),
            "stage": torch.tensor(GATHER),
            "again": state["again"] + 1,
            **dict.fromkeys(("moved", "changed", "k_hat_client"), nan),
        }
