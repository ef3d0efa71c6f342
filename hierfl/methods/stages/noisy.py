"""The server of two_stage where clients have sent the sums of a Gaussian likelihood with noise.

What the noise does to a client's sums depends on what its coefficients and its design may be
(`hierfl.summaries.noisy_sums`), which all sums together tell. So draws are made a few times, each
time by what the last ones say of any client's coefficients. The mean design of all clients is known
up to noise; of the final draws some are made by each of several designs (multiple imputation, Rubin
1987).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.method import Clock, Reports, Surprise
from hierfl.methods.stages.checks import DONE, GATHER
from hierfl.methods.stages.server import Rounds
from hierfl.methods.stages.weighting import Weighting
from hierfl.program.few_rows import double_precision
from hierfl.program.handlers import unchecked
from hierfl.summaries.conditional import belief_shapes
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.noisy_sums import Designs, NoisySums
from hierfl.summaries.sampling import one_thread
from hierfl.summaries.surprise import Known, surprises
from hierfl.summaries.surrogate import Surrogate

PASSES, SETTLED = 8, 0.05  # beliefs, at most; changes of E[v^2] that no longer matter
DESIGNS = 16  # by which final draws are made
ROUNDS = 1000  # apart, for other seeds
UNKNOWN = 0.4  # relative error of the mean square of a column, beyond which little is known


@dataclass(frozen=True, eq=False)
class RoundsOfNoisySums(Rounds):
    """The server's part of the only round."""

    def begin(self) -> Tree:
        """Return the state before the round."""
        state = super().begin()
        factors = dict(state["factors"])
        count, size = factors["shift"].shape
        factors["noisy_square"] = factors.pop("square")
        shapes = belief_shapes(size).items()
        none = {name: torch.zeros(count, *of, dtype=torch.float64) for name, of in shapes}
        return {**state, "factors": {**factors, "belief": none}}

    def belief(self, state: Tree) -> Tree:
        """Return what is believed of any client, by which it draws its own sites."""
        return {name: value[0] for name, value in state["factors"]["belief"].items()}

    def gathered(self, state: Tree, reports: Reports, clock: Clock) -> Tree:
        """Return the state after clients have sent sums."""
        old, sent = state["factors"], reports.value
        new = {name: sent[name] for name in old if name != "belief"}
        state = self.with_sent(state, new, reports)
        seen = state["seen"]
        ended = bool((seen | state["failed"]).all())
        if not ended and clock.round + 1 < clock.rounds:
            return state
        state = sampled_of_noisy(self.work, state, clock)
        effective = state["share"] * len(state["final"]["draws"])
        stage = torch.tensor(DONE if ended else GATHER)
        return {**state, "stage": stage, "weighted": seen.clone(), "effective": effective}

    def surprise(self, state: Tree) -> Surprise | None:
        """Return how surprising each client's sums are given the others', at the mean noise scale."""
        if int(state["stage"]) != DONE:
            return None
        with double_precision(), one_thread(), torch.no_grad(), unchecked():
            hierarchy, draws = self.work.surrogate.hierarchy, state["final"]["draws"]
            assert hierarchy.spread is not None
            scale = torch.vmap(hierarchy.spread.at)(draws[:, : self.work.shared]).mean()
            here = _noise(self.work).at(Factors(**state["factors"]), scale)[0]
            factors = Factors(here.precision, here.shift, here.fields)
            surrogate = Surrogate(replace(hierarchy, spread=None, noise=None))
            measures = surprises(Known(surrogate, factors, draws, state["bounds"], self.work.seed))
            return Surprise(*(v[hierarchy.program.ranks] for v in measures))


def _noise(work: Weighting) -> NoisySums:
    return cast("NoisySums", work.surrogate.hierarchy.noise)


def sampled_of_noisy(work: Weighting, state: Tree, clock: Clock) -> Tree:
    """Return the state with final draws of the posterior given noisy sums."""
    noise = _noise(work)
    designs = noise.designs(Factors(**state["factors"]))
    error = designs.error()
    if error > UNKNOWN:
        warnings.warn(
            f"the noise hides the clients' covariates: the mean square of one is known to "
            f"{error:.0%}, so that intervals of coefficients may be too narrow. Raise epsilon, lower "
            "max_row_norm, leave covariates out, or take clients with more rows",
            stacklevel=2,
        )
    design = {"design": designs.drawn(None), "between": designs.between}
    state = _believing(state, {name: noise.whole(v[None])[0] for name, v in design.items()})
    before = _second(state)
    for _ in range(PASSES):
        state = work.sampled(state, Factors(**state["factors"]), "scouts", clock)
        state = _believing(state, _belief(work, state))
        now = _second(state)
        if bool(((now - before).abs() <= SETTLED * now.max()).all()):
            break
        before = now
    return _imputed(work, state, noise, designs, clock)


def _belief(work: Weighting, state: Tree) -> Tree:
    """Return mean of any client's v, and its covariance: of all clients in common, and within."""
    surrogate, scouts = work.surrogate, state["scouts"]
    share = scouts["log_weights"].exp()
    draws = scouts["draws"]
    means, covariances = surrogate.moments(draws, draws[:, :0], Factors(**state["factors"]))
    mean = torch.tensordot(share, means.mean(1), 1)
    away = (means - mean).flatten(0, 1)
    count = means.shape[1]
    common = away.mT @ (away * share.repeat_interleave(count)[:, None]) / count
    within, size = torch.zeros_like(common), covariances.shape[-1]
    within[:size, :size] = torch.tensordot(share, covariances.mean(1), 1)
    return {"mean": mean, "common": common, "within": within}


def _imputed(
    work: Weighting, state: Tree, noise: NoisySums, designs: Designs, clock: Clock
) -> Tree:
    """Return the state with final draws, some by each of several designs."""
    g = torch.Generator().manual_seed(work.seed & 0x7FFFFFFF)
    count, imputations = len(state["final"]["draws"]), []
    thinned = {**state, "final": {n: v[: -(-count // DESIGNS)] for n, v in state["final"].items()}}
    for turn in range(DESIGNS):
        imputed = _believing(thinned, {"design": noise.whole(designs.drawn(g)[None])[0]})
        other = clock._replace(round=clock.round + ROUNDS * turn)
        imputations.append(work.sampled(imputed, Factors(**imputed["factors"]), "final", other))
    final = {
        name: torch.stack([imputed["final"][name] for imputed in imputations], 1).flatten(0, 1)[
            :count
        ]
        for name in ("draws", "log_p")
    }
    diagnostics = {
        n: torch.stack([imputed[n] for imputed in imputations]) for n in ("k_hat", "share", "r_hat")
    }
    return {
        **state,
        "final": {**final, "log_weights": torch.full((count,), -math.log(count))},
        "sampled": torch.tensor(True),
        "k_hat": diagnostics["k_hat"].max(),
        "share": diagnostics["share"].mean(),
        "r_hat": diagnostics["r_hat"].max(),
    }


def _believing(state: Tree, belief: Tree) -> Tree:
    """Return the state with some of what is believed of any client's v, (V,) or (V, V) each."""
    old = state["factors"]["belief"]
    new = {name: value.expand_as(old[name]).clone() for name, value in belief.items()}
    return {**state, "factors": {**state["factors"], "belief": {**old, **new}}}


def _second(state: Tree) -> Tensor:
    """Return E[v^2] of any client's v, (V,)."""
    belief = {name: value[0] for name, value in state["factors"]["belief"].items()}
    within = belief["within"].diagonal() + belief["common"].diagonal()
    second: Tensor = belief["mean"].square() + within
    return second
