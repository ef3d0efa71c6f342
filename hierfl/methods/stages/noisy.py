"""The server of two_stage where clients have sent the sums of a Gaussian likelihood with noise.

What the noise does to a client's sums depends on what its coefficients and its design may be
(`hierfl.summaries.noisy_sums`), which all sums together tell. So draws are made a few times, each
time by what the last ones say of any client's coefficients. The mean design of all clients is known
up to noise; of the final draws some are made by each of several designs (multiple imputation, Rubin
1987).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from hierfl.core.process import double_precision
from hierfl.core.trees import tree_map
from hierfl.core.user_warnings import warn
from hierfl.guides.from_factor import belief_shapes
from hierfl.method import Clock, Reports, Surprise
from hierfl.methods.stages.server import Rounds
from hierfl.methods.stages.state import ServerState
from hierfl.methods.stages.weighting import Weighting
from hierfl.program.handlers import unchecked
from hierfl.program.sites import Values
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.noisy_sums import Designs, NoisySums
from hierfl.summaries.sampling import one_thread
from hierfl.summaries.surprise import Known, surprises
from hierfl.summaries.surrogate import Surrogate
from hierfl.summaries.weights import Points

PASSES, SETTLED = 8, 0.05  # beliefs, at most; changes of E[v^2] that no longer matter
DESIGNS = 16  # by which final draws are made
SENT = ("precision", "shift", "fields", "num_rows", "noisy_square")
ROUNDS = 1000  # apart, for other seeds
UNKNOWN = 0.4  # relative error of the mean square of a column, beyond which little is known


@dataclass(frozen=True, eq=False)
class RoundsOfNoisySums(Rounds):
    """The server's part of the only round."""

    def begin(self) -> ServerState:
        """Return the state before the round."""
        state = super().begin()
        factors, (count, size) = state.factors, state.factors.shift.shape
        shapes = belief_shapes(size).items()
        none = {name: torch.zeros(count, *of, dtype=torch.float64) for name, of in shapes}
        noisy = replace(factors, square=None, noisy_square=factors.square, belief=none)
        return replace(state, factors=noisy)

    def belief(self, state: ServerState) -> Values:
        """Return what is believed of any client, by which it draws its own sites."""
        return _believed(state)

    def gathered(self, state: ServerState, reports: Reports, clock: Clock) -> ServerState:
        """Return the state after clients have sent sums."""
        sent = {name: reports.value[name] for name in SENT}
        state = self.with_sent(state, sent, reports)
        if not state.all_seen and clock.round + 1 < clock.rounds:
            return state
        state = sampled_of_noisy(self.work, state, clock)
        return state.ended(state.share * len(state.final.draws))

    def surprise(self, state: ServerState) -> Surprise | None:
        """Return how surprising each client's sums are given the others', at the mean noise scale."""
        if not state.is_done:
            return None
        with double_precision(), one_thread(), torch.no_grad(), unchecked():
            hierarchy, draws = self.work.surrogate.hierarchy, state.final.draws
            assert hierarchy.spread is not None
            scale = torch.vmap(hierarchy.spread.at)(draws[:, : self.work.shared]).mean()
            here = _noise(self.work).at(state.factors, scale)[0]
            factors = Factors(here.precision, here.shift, here.fields)
            surrogate = Surrogate(replace(hierarchy, spread=None, noise=None))
            known = Known(surrogate, factors, draws, state.bounds, self.work.seed)
            p, away, _ = surprises(known)
            return Surprise(p[hierarchy.program.ranks], away[hierarchy.program.ranks])


def _noise(work: Weighting) -> NoisySums:
    return cast("NoisySums", work.surrogate.hierarchy.noise)


def sampled_of_noisy(work: Weighting, state: ServerState, clock: Clock) -> ServerState:
    """Return the state with final draws of the posterior given noisy sums."""
    noise = _noise(work)
    designs = noise.designs(state.factors)
    error = designs.error()
    if error > UNKNOWN:
        warn(
            f"the noise hides the clients' covariates: the mean square of one is known to "
            f"{error:.0%}, so that intervals of coefficients may be too narrow. Raise epsilon, lower "
            "max_row_norm, leave covariates out, or use clients with more rows",
        )
    design = {"design": designs.drawn(None), "between": designs.between}
    state = _believing(state, {name: noise.whole(v[None])[0] for name, v in design.items()})
    before = _second(state)
    for _ in range(PASSES):
        state = work.with_scouts(state, clock)
        state = _believing(state, _belief(work, state))
        now = _second(state)
        if bool(((now - before).abs() <= SETTLED * now.max()).all()):
            break
        before = now
    return _imputed(work, state, noise, designs, clock)


def _belief(work: Weighting, state: ServerState) -> Values:
    """Return mean of any client's v, and its covariance: of all clients in common, and within."""
    draws, share = state.scouts.draws, state.scouts.log_weights.exp()
    means, covariances = work.surrogate.moments(draws, draws[:, :0], state.factors)
    mean = torch.tensordot(share, means.mean(1), 1)
    away = (means - mean).flatten(0, 1)
    count = means.shape[1]
    common = away.mT @ (away * share.repeat_interleave(count)[:, None]) / count
    within, size = torch.zeros_like(common), covariances.shape[-1]
    within[:size, :size] = torch.tensordot(share, covariances.mean(1), 1)
    return {"mean": mean, "common": common, "within": within}


def _imputed(
    work: Weighting, state: ServerState, noise: NoisySums, designs: Designs, clock: Clock
) -> ServerState:
    """Return the state with final draws, some by each of several designs."""
    g = torch.Generator().manual_seed(work.seed & 0x7FFFFFFF)
    count = len(state.final.draws)
    few = tree_map(lambda v: v[: -(-count // DESIGNS)], state.final)
    imputed = []
    for turn in range(DESIGNS):
        design = {"design": noise.whole(designs.drawn(g)[None])[0]}
        other = clock._replace(round=clock.round + ROUNDS * turn)
        imputed.append(work.with_final(_believing(replace(state, final=few), design), other))
    draws, log_p = (
        torch.stack([getattr(of.final, name) for of in imputed], 1).flatten(0, 1)[:count]
        for name in ("draws", "log_p")
    )
    return replace(
        state,
        final=Points.equal(draws, log_p),
        sampled=torch.tensor(True),
        k_hat=torch.stack([of.k_hat for of in imputed]).max(),
        share=torch.stack([of.share for of in imputed]).mean(),
        r_hat=torch.stack([of.r_hat for of in imputed]).max(),
    )


def _believed(state: ServerState) -> Values:
    return {name: value[0] for name, value in (state.factors.belief or {}).items()}


def _believing(state: ServerState, belief: Values) -> ServerState:
    """Return the state with some of what is believed of any client's v, (V,) or (V, V) each."""
    old = dict(state.factors.belief or {})
    new = {name: value.expand_as(old[name]).clone() for name, value in belief.items()}
    return replace(state, factors=replace(state.factors, belief={**old, **new}))


def _second(state: ServerState) -> Tensor:
    """Return E[v^2] of any client's v, (V,)."""
    belief = _believed(state)
    within = belief["within"].diagonal() + belief["common"].diagonal()
    return belief["mean"].square() + within
