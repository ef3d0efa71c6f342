"""What the server of two_stage can tell after the last round, without another one.

It has each client's factor, or the sums of a Gaussian likelihood, and each client's log ratio at
the draws that were weighted. So the posterior without a client, or with a prior or a client that
counts more, is arithmetic here:

    p(z | all but k)  ~  p(z) prod_{j != k} integral p(w | z) factor_j(v) dw exp(ratio_j(z))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import LOG_2_PI
from hierfl.core.importance_sampling import K_HAT
from hierfl.core.process import double_precision
from hierfl.core.trees import copied, tree_map
from hierfl.data.absent import RowsNotSaved
from hierfl.method import Clock, Method
from hierfl.methods.stages.server import Rounds
from hierfl.methods.stages.state import DONE, OF_CLIENTS, ServerState
from hierfl.methods.stages.sums import RoundsOfSums
from hierfl.methods.stages.two_stage import server_rounds
from hierfl.methods.stages.weighted import Weighted, warn_of_sds, weighted
from hierfl.methods.stages.weighting import ENOUGH, PROPOSING
from hierfl.program.handlers import unchecked
from hierfl.program.program import Program
from hierfl.program.sites import Values, recipe_of
from hierfl.summaries.carried import GOOD, carried_over
from hierfl.summaries.conditional import terms_of_clients
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.sampling import one_thread
from hierfl.summaries.weights import Points

IN_PLACE = "in one process pass the rows, hierfl.load(folder, data=...)"


class AnotherRound(ValueError):
    """What the server has kept does not suffice: clients have to be asked; the message says whom."""


def rounds_of(method: Method, program: Program, what: str) -> Rounds:
    """Return the server's part of two_stage for a program; refuse `what` of any other method."""
    recipe = recipe_of(method)
    if recipe is None or recipe.factory.__name__ != "two_stage":
        raise ValueError(
            f"{what} is computed from the clients' factors that two_stage keeps, and this fit is of "
            f"'{method.name}': fit by hierfl.methods.two_stage(model), or fit again without it"
        )
    return server_rounds(program, recipe.options["draws"], recipe.options["row_noise"])


class Densities(NamedTuple):
    """Log densities at S draws of the global sites, with log weights (S,) of the posterior."""

    values: Values  # site -> (S, *shape)
    points: Tensor  # (S, K), the same unconstrained
    log_volume: Tensor  # (S,), log Jacobian of the values in the points
    log_weights: Tensor  # (S,), normalized
    log_prior: Tensor  # (S,) of the global sites, as the program writes it
    # (S, N) log p(y_k | z), local sites integrated out, up to a constant of each client; None where
    # clients have local sites that are not Normal, which the server has drawn
    log_likelihood: Tensor | None


@dataclass(frozen=True, eq=False)
class Kept:
    """The server of a run of two_stage; its clients are in the order of their names."""

    rounds: Rounds
    state: ServerState

    def __post_init__(self) -> None:
        """Refuse a run that is not done."""
        if not self.state.is_done:
            raise ValueError("two_stage is not done: its rounds ended before its draws were final")

    @property
    def is_exact(self) -> bool:
        """Whether nothing was weighted: sums of a Gaussian likelihood, or factors with row noise."""
        return self.rounds.work.surrogate.hierarchy.spread is not None or bool(self.rounds.gathers)

    def ratios(self, without: Tensor | None = None) -> Tensor:
        """Return log ratios (A, n) of the clients at the asked draws, but of those in a mask (N,)."""
        each = self.state.each
        if not each.shape[1]:
            raise AnotherRound(
                "log ratios of so many clients are kept as sums alone: fit again, hierfl.fit(...)"
            )
        return each if without is None else each[:, ~without]

    def asked(self) -> Tensor:
        """Return which of the final draws have log ratios, (A,) int64."""
        count, asked = len(self.state.final.draws), len(self.state.each)
        return torch.arange(asked) * (count // asked)

    def alive(self) -> Tensor:
        """Return which of the final draws have any weight, (S,); others may lie where no digits are left."""
        return self.state.final.log_weights.isfinite()

    def densities(self) -> Densities:
        """Return the log densities of prior and clients at the draws of the posterior."""
        with double_precision(), one_thread(), torch.no_grad(), unchecked():
            work, draws = self.rounds.work, self.state.final.draws
            log_weights, alive = self.state.final.log_weights, self.alive()
            log_z, marginals = work.surrogate.log_marginals(draws, self.state.factors)
            z = draws[:, : work.shared]
            if not self.is_exact:
                marginals = marginals + self._everywhere(z, log_z + marginals.sum(1))
            block = work.surrogate.hierarchy.program.latents.global_block

            def parts(one: Tensor) -> tuple[Values, Tensor]:
                values, jacobians = block.unflatten(one)
                return values, torch.stack([j.sum() for j in jacobians.values()]).sum()

            values, jacobian = torch.vmap(parts)(z[alive])
            clients = None if work.surrogate.mixed else marginals[alive]
            log_prior = log_z[alive] - jacobian
            return Densities(
                dict(values), z[alive], jacobian, log_weights[alive], log_prior, clients
            )

    def constants(self) -> Tensor:
        """Return what the sums of a Gaussian likelihood lack of log p(y_k | z), (N,): -N log(2 pi g^2) / 2."""
        rounds, factors = self.rounds, self.state.factors
        hierarchy, num_rows = rounds.work.surrogate.hierarchy, factors.num_rows
        spread = hierarchy.spread
        if isinstance(rounds, RoundsOfSums):
            spread, num_rows = rounds.client.spread, (factors.sums or {})["num_rows"]
        if spread is None:
            return torch.zeros(len(self.state.seen))
        if hierarchy.noise is not None:
            what = "the clients' sums have noise, so that models cannot be compared by them"
            raise RowsNotSaved(f"{what}: leave row_noise out, or {IN_PLACE}")
        if num_rows is None or not len(spread.line.rest):
            what = (
                "the noise scale is fixed, so clients have not sent their residual sums of squares"
            )
            raise RowsNotSaved(f"{what}: give it a prior, pyro.sample, or {IN_PLACE}")
        if not spread.is_equal:
            what = "the likelihood is LogNormal, or noise scales differ by row: clients' sums lack these units"
            raise RowsNotSaved(f"{what}: {IN_PLACE}")
        with double_precision(), torch.no_grad(), unchecked():
            return -num_rows * (0.5 * LOG_2_PI + spread.first.log())

    def _everywhere(self, z: Tensor, log_p: Tensor) -> Tensor:
        """Return the clients' log ratios at all draws (S, N)."""
        each, at = self.ratios(), self.asked()
        if len(at) == len(z):
            return each
        each, at = each[self.alive()[at]], at[self.alive()[at]]
        base = (log_p - self.state.final.log_p)[at]
        every = torch.arange(each.shape[1])
        own = terms_of_clients(self.rounds.work.surrogate.hierarchy, self.state.factors, every)
        carried = carried_over(each, z[at], base, z, own)
        if not carried.error <= GOOD:
            raise AnotherRound(
                f"clients have weighted {len(at)} of {len(z)} draws, from which their log ratios at "
                "the others cannot be told: fit with fewer draws"
            )
        return carried.ratios

    def without(self, out: Tensor, after: Rounds) -> ServerState:
        """Return the state without the clients of a mask (N,), for the server of the others."""
        with double_precision(), one_thread(), torch.no_grad(), unchecked():
            state = self._left(out, after)
            if isinstance(after, RoundsOfSums):
                return self._settled(after.played(state), after)
            if self.is_exact:
                state = self._drawn(state, after)
                count = state.share * len(state.final.draws)
                return self._settled(replace(state, effective=count), after)
            return self._settled(self._weighted(state, out, after), after)

    def asking(self, out: Tensor, after: Rounds) -> ServerState:
        """Return the state that lets the clients outside a mask (N,) weight new draws."""
        with double_precision(), one_thread(), torch.no_grad(), unchecked():
            state = replace(self._left(out, after), belief=self.state.belief)
            return copied(after.work.to_weight(state, Clock(0, 1)))

    def _weighted(self, state: ServerState, out: Tensor, after: Rounds) -> ServerState:
        """Return the state with weighted draws: those there are, or new ones, whichever are better."""
        first, new = self._weighted_again(state, out, after), self._drawn_again(state, out, after)
        tried = [*([] if first is None else [first]), next(new)]
        good = [one for one in tried if one.is_good(ENOUGH) and one.has_sds()]
        if not good:
            tried += new
            good = [one for one in tried if one.is_good(PROPOSING)]
        if good:
            best = min(good, key=Weighted.worst)
            warn_of_sds(best, after.work.surrogate.hierarchy.program)
            return best.state
        how = "; ".join(f"k-hat {one.k_hat:.2f}, error {one.error:.2f} nats" for one in tried)
        raise AnotherRound(
            f"what the server has kept does not reach the posterior of the others ({how}; k-hat may "
            f"be up to {K_HAT}, the error up to {GOOD}): they have to weight new draws, "
            "fit.without(client, rounds=4) where their rows are, or a fit of theirs"
        )

    def _left(self, out: Tensor, after: Rounds) -> ServerState:
        """Return the state of a new server, with what the others have sent."""
        begun, state = after.begin(), self.state
        stay = (~out).nonzero()[:, 0]
        factors: Factors = tree_map(lambda v: v[stay], state.factors)
        _check_alike(begun.factors, factors)
        draws = self._own(state.final.resampled(len(begun.scouts.draws)), out)
        return replace(
            begun.at(DONE),
            factors=factors,
            scouts=Points.equal(draws),
            powers=state.powers[stay],
            inner_error=state.inner_error,
            **{name: getattr(state, name)[stay] for name in OF_CLIENTS},
        )

    def _own(self, draws: Tensor, out: Tensor) -> Tensor:
        """Return draws (S, K + N M) without the mixing numbers of the clients that leave."""
        work = self.rounds.work
        z, t = draws[:, : work.shared], draws[:, work.shared :]
        t = t.reshape(len(draws), len(out), -1)[:, ~out]
        return torch.cat([z, t.flatten(1)], 1)

    def _drawn(self, state: ServerState, after: Rounds) -> ServerState:
        """Return the state with new draws of the surrogate of the others' factors."""
        if after.work.surrogate.hierarchy.noise is not None:
            from hierfl.methods.stages.noisy import sampled_of_noisy  # here: few fits need it

            return sampled_of_noisy(after.work, state, Clock(0, 1))
        return after.work.with_final(state, Clock(0, 1))

    def _weighted_again(self, state: ServerState, out: Tensor, after: Rounds) -> Weighted | None:
        """Weight the draws there are for the others; None where they are of another number."""
        final, at = self.state.final, self.asked()
        whole = len(at) == len(final.draws) == len(state.final.draws)
        if after.work.surrogate.mixed or not whole:
            return None
        base = after.work.log_p(final.draws, state.factors) - final.log_p
        base = torch.where(self.alive(), base, -torch.inf)
        state = replace(state, final=final, share=self.state.share)
        return weighted(state, self.ratios(out), base, 0.0, after.work.shared)

    def _drawn_again(self, state: ServerState, out: Tensor, after: Rounds) -> Iterator[Weighted]:
        """Yield new draws, of the others' factors and then about these, with log ratios carried over."""
        work, shared, alive = after.work, after.work.shared, self.alive()[self.asked()]
        at, each = self.asked()[alive], self.ratios(out)[alive]
        z, base = self.state.final.draws[at, :shared], self._base(at, out)
        every = torch.arange(each.shape[1])
        own = terms_of_clients(work.surrogate.hierarchy, state.factors, every)

        def reweighted(state: ServerState) -> Weighted:
            carried = carried_over(each, z, base, state.final.draws[:, :shared], own)
            return weighted(state, carried.ratios, work.wider(state), carried.error, shared)

        state = self._drawn(state, after)
        drawn = reweighted(state)
        yield drawn
        if work.surrogate.mixed:
            return
        about = work.proposed(state, drawn.state.final)
        flags = {name: getattr(state, name) for name in OF_CLIENTS}
        yield reweighted(replace(about, stage=state.stage, inner_error=state.inner_error, **flags))

    def _base(self, at: Tensor, out: Tensor) -> Tensor:
        """Return log weights (A,), but for ratios, that make draws of the state the others'."""
        work, final = self.rounds.work, self.state.final
        log_z, marginals = work.surrogate.log_marginals(final.draws[at], self.state.factors)
        if work.surrogate.mixed:  # they were drawn given every t: as they are
            return torch.zeros(len(at))
        return log_z + marginals[:, ~out].sum(1) - final.log_p[at]

    def _settled(self, state: ServerState, after: Rounds) -> ServerState:
        """Return a state that a later round could go on from."""
        work = after.work
        if work.surrogate.hierarchy.spread is None:
            scouts = work.scouts_of(state)
            state = replace(state, belief=work.of_any_client(scouts, state.factors))
        else:  # nothing is weighted, and the density is not needed
            scouts = Points.equal(state.final.resampled(len(state.scouts.draws)))
        return copied(replace(state, scouts=scouts, sampled=torch.tensor(True)))


def _check_alike(factors: Factors, other: Factors) -> None:
    """Refuse factors of another program: a site may have a size that a client's codes gave."""
    if factors.precision.shape != other.precision.shape:
        raise ValueError(
            "the program has other parameters without this client, whose codes gave a site its "
            "size: give sizes in the model, or a schema, and fit again"
        )
