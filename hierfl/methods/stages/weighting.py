"""Draws of the server of two_stage, and their weights by what clients send of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hierfl.core.importance_sampling import DOUBT, K_HAT, fitted, normal_points, rests_on_few
from hierfl.method import Clock, Reports
from hierfl.methods.stages.checks import NOWHERE, OFF
from hierfl.methods.stages.state import DONE, Attempt, Belief, ServerState
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.sampling import Start, sample
from hierfl.summaries.surrogate import Surrogate, any_client
from hierfl.summaries.weights import (
    LIGHT,
    Points,
    error_of_sds,
    everywhere,
    is_heavy,
    k_hats_of,
    moments,
    smoothed,
    tempered,
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

    def asked(self, state: ServerState) -> Tensor:
        """Return which of the final draws clients weight, (A,) int64, evenly among them."""
        count, weighted = len(state.final.draws), len(state.asked)
        return torch.arange(weighted) * (count // weighted)

    def of_any_client(self, points: Points, factors: Factors) -> Belief:
        """Return what any client's v may be."""
        return Belief.of(*any_client(self.surrogate, points.draws, points.log_weights, factors))

    def to_weight(self, state: ServerState, clock: Clock) -> ServerState:
        """Return the state with draws of the surrogate for clients to weight."""
        if len(state.asked) < len(state.final.draws):
            return self.proposed(state, state.scouts)
        return self.with_final(state, clock).asking()

    def with_scouts(self, state: ServerState, clock: Clock, *, rough: bool = False) -> ServerState:
        """Return the state with new draws of the surrogate, by which factors are gathered."""
        count = len(state.scouts.draws)
        new, scouts = self._sampled(state, state.factors, count, clock, rough=rough)
        return replace(new, scouts=scouts)

    def with_final(self, state: ServerState, clock: Clock) -> ServerState:
        """Return the state with new final draws, of the surrogate with its factors' powers."""
        count, factors = len(state.final.draws), state.factors
        is_wider = (state.powers < 1.0).any()
        factors = factors.to_powers(state.powers) if bool(is_wider) else factors
        new, final = self._sampled(state, factors, count, clock, final=True)
        return replace(new, final=final, proposed=is_wider)

    def _sampled(
        self,
        state: ServerState,
        factors: Factors,
        count: int,
        clock: Clock,
        *,
        final: bool = False,
        rough: bool = False,
    ) -> tuple[ServerState, Points]:
        """Return the state after sampling, and the draws."""
        scouts, seed = state.scouts, self.seed + 7919 * (clock.round + 1)
        start = Start(scouts.draws, scouts.log_weights, state.bounds, not bool(state.sampled))
        drawn = sample(self.surrogate, factors, count, start, final=final, seed=seed, rough=rough)
        exact, count = factors.num_rows is not None, len(drawn.draws)
        # of sums nothing is weighted, and the density is not needed
        log_p = torch.zeros(count) if exact else drawn.log_p
        log_p = log_p - (drawn.log_weights + math.log(count))
        state = replace(
            state,
            sampled=torch.tensor(True),
            share=torch.tensor(drawn.share),
            r_hat=torch.tensor(drawn.r_hat),
            k_hat=torch.tensor(drawn.k_hat) if exact else state.k_hat,
        )
        return state, Points(drawn.draws, log_p, drawn.log_weights)

    def log_p(self, draws: Tensor, factors: Factors) -> Tensor:
        """Return the log density of the surrogate at draws of z, (S,)."""
        log_z, marginals = self.surrogate.log_marginals(draws, factors)
        return log_z + marginals.sum(1)

    def after_weighting(self, state: ServerState, reports: Reports, clock: Clock) -> ServerState:
        """Return the state after clients have sent log ratios of likelihoods and factors."""
        final, new = state.final, ~state.weighted[reports.ids]
        ids, single = reports.ids[new], reports.value[new].mT.double()  # (A, n)
        total, singles = state.asked + single.sum(1), state.each
        base, z = self.wider(state), final.draws[:, : self.shared]
        ratios, error = everywhere(total, self.asked(state), z, base)
        k_hats = k_hats_of(single)
        highest = total
        if bool(state.chained):  # the draws are of the posterior itself, whatever the ratios
            error, highest = 0.0, total.nan_to_num(0.0)
            weights = smoothed(torch.zeros_like(ratios))
            final = replace(final, log_p=self.log_p(final.draws, state.factors) + ratios)
        else:
            weights = smoothed(ratios + base)
        if not float(highest.max()) > 0.5 * NOWHERE:
            weights = weights._replace(k_hat=math.inf, effective=0.0)
        state = replace(
            state,
            asked=total,
            each=singles.index_copy(1, ids, single) if singles.shape[1] else singles,
            ratios=ratios,
            weighted=state.weighted.index_fill(0, ids, True),
            heavy=state.heavy.index_copy(0, ids, is_heavy(k_hats, single)),
            k_hat_client=self._worst(state, k_hats),
            k_hat=torch.tensor(weights.k_hat),
            effective=state.share * weights.effective,
        )
        complete = bool((state.weighted | state.failed).all())
        if not complete and clock.round + 1 < clock.rounds:
            return state
        state = replace(state.with_error(error), final=replace(final, log_weights=weights.log))
        return self._after_all(state, error, clock) if complete else state

    def _after_all(self, state: ServerState, error: float, clock: Clock) -> ServerState:
        """Return the state once every client has answered: done, or with other draws to weight."""
        if bool(state.chained):  # no error of the ratios is one of the draws
            return replace(state.at(DONE), inner_error=torch.tensor(torch.nan))
        rounds_left, count = clock.rounds - clock.round - 1, len(state.ratios)
        again, proposed, before = int(state.again), bool(state.proposed), state.before
        anchored, effective = state.was_anchored, float(state.effective)
        enough, restarts = (ENOUGH_OF_ANCHORED, AGAIN_OF_ANCHORED) if anchored else (ENOUGH, AGAIN)
        is_thin, better = effective < enough * count, float(state.k_hat) < float(before.k_hat)
        right = not effective < min(float(before.effective), ENOUGH * count)
        poor = is_thin or self._rests_on_few(state)
        tries_again = poor and again < restarts
        if proposed:
            state = replace(state, apart=self._apart(state.attempt(), before))
        else:
            few_scalars = self.shared <= MOST_PROPOSED
            tries_again = bool(state.heavy.any()) or ((poor or anchored) and few_scalars)
        worse = not better and effective < float(before.effective)
        if proposed and (worse or not (right or (better and effective > PROPOSING * count))):
            # it missed more than they did
            state, error, tries_again = state.returned(before), 0.0, False
        if error > ROUGH and rounds_left > 0:  # a quadratic will not do
            each = torch.zeros(len(state.ratios), state.each.shape[1])
            return replace(state.asking(), asked=torch.zeros(len(each)), each=each)
        if tries_again and rounds_left > 0 and not self.surrogate.mixed:
            many = self.shared > MOST_PROPOSED and state.each.shape[1] > 0
            if not proposed and many:
                return self._tempered(state, clock)
            return self.proposed(replace(state, again=state.again + proposed), state.final)
        if float(state.k_hat) >= K_HAT and again < AGAIN and rounds_left > 1:
            return self._from_weighted(state)
        return state.at(DONE)

    def _rests_on_few(self, state: ServerState) -> bool:
        """Return whether the tails, or the sd of a global scalar, rest on a few draws."""
        log_weights = state.final.log_weights
        errors = error_of_sds(state.final.draws[:, : self.shared], log_weights)
        return rests_on_few(log_weights, float(state.k_hat)) or not bool((errors <= OFF).all())

    def _apart(self, now: Attempt, before: Attempt) -> Tensor:
        """Return by how much two sets of weighted draws differ, beyond chance; 0 if one tells little."""
        sets = [(of.final, float(of.k_hat), float(of.effective)) for of in (now, before)]
        if any(not (k_hat < K_HAT and count >= COMPARED) for _, k_hat, count in sets):
            return torch.tensor(0.0)
        spreads = [self._spread(final, k_hat, count) for final, k_hat, count in sets]
        (mean, sd, error), (other, other_sd, other_error) = spreads
        shift, ratio = ((mean - other) / sd).abs(), (sd / other_sd).log().abs()
        beyond = shift.maximum(ratio) - FAR * error.hypot(other_error)
        return beyond.nan_to_num().max().clamp(min=0.0)

    def _spread(self, final: Points, k_hat: float, count: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return means and sds of z by weighted draws, (K,), and their relative errors."""
        z, log_weights = final.draws[:, : self.shared], final.log_weights
        # from k-hat 0.5 on errors are larger than weights tell
        unsure = UNSURE_TAILS if k_hat >= DOUBT else 1.0
        return *moments(z, log_weights), unsure * error_of_sds(z, log_weights).clamp(
            min=count**-0.5
        )

    def _worst(self, state: ServerState, k_hats: Tensor) -> Tensor:
        """Return the largest k-hat of a client's weights of draws of the surrogate."""
        largest = state.k_hat_client
        if bool(state.proposed) and bool(largest.isfinite()):
            return largest
        return torch.cat([largest[None].nan_to_num(), k_hats]).max()

    def _tempered(self, state: ServerState, clock: Clock) -> ServerState:
        """Return the state with draws of a surrogate whose factors reach into clients' tails."""
        ids = state.heavy.nonzero()[:, 0]
        z, ratios = state.final.draws[self.asked(state)], state.each[:, ids]
        own, powers = state.factors.of(ids), torch.ones(len(ids))
        whole, heavy = self.surrogate.log_marginals(z, own)[1], torch.ones(len(ids)) > 0.0
        for power in POWERS:
            powers[heavy] = power
            there = self.surrogate.log_marginals(z, own.to_powers(powers))[1]
            heavy = heavy & (k_hats_of(ratios + whole - there) > LIGHT)
            if not bool(heavy.any()):
                break
        powers = state.powers.index_copy(0, ids, powers.to(state.powers))
        drawn = self.with_final(replace(state, powers=powers), clock)
        return replace(drawn.asking(), before=state.attempt())

    def wider(self, state: ServerState) -> Tensor:
        """Return the surrogate's log density minus that which the draws are from, (S,)."""
        draws = state.final.draws
        if not bool(state.proposed):
            return torch.zeros(len(draws))
        s, (low, high) = draws[:, self.surrogate.hierarchy.outside], state.bounds
        far = ((s < low) | (s > high)).any(1)  # where scales have no digits left
        return torch.where(far, -torch.inf, self.log_p(draws, state.factors) - state.final.log_p)

    def proposed(self, state: ServerState, weighted: Points) -> ServerState:
        """Draw about weighted draws: the errors of very many factors can exceed the posterior's width."""
        count, size = state.final.draws.shape
        proposal = fitted(weighted.draws, tempered(weighted.log_weights, PROPOSING))
        drawn = Points.equal(*proposal.at(normal_points(count, size + 1, seed=self.seed)))
        is_weighted = math.isfinite(float(state.effective))
        return replace(
            state.asking(),
            proposed=torch.tensor(True),
            final=drawn,
            share=torch.tensor(1.0),
            before=state.attempt() if is_weighted else state.before,
        )

    def scouts_of(self, state: ServerState) -> Points:
        """Return scouts of equal weight from the weighted final draws."""
        draws = state.final.resampled(len(state.scouts.draws))
        return Points.equal(draws, self.log_p(draws, state.factors))

    def _from_weighted(self, state: ServerState) -> ServerState:
        """Return the state that re-collects factors around the weighted draws."""
        scouts = self.scouts_of(state)
        belief, again = self.of_any_client(scouts, state.factors), state.again + 1
        return replace(state.gathering(), scouts=scouts, belief=belief, again=again)
