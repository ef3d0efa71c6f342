"""The server of FedLaplace: climb to the mode, settle q, weigh its points; a state machine over a dict of tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import pyro
import torch
from torch import Tensor

from hierfl.core.importance_sampling import (
    Split,
    heavy_points,
    normal_points,
    resampled,
    sides,
    smoothed,
)
from hierfl.core.trees import Tree, tree_map
from hierfl.guides.global_sites import normal_params
from hierfl.laplace.marginal import Expansion, Marginal
from hierfl.laplace.newton import climbed, climbing, settled, settling, tril_of
from hierfl.method import Clock
from hierfl.program.program import Params

CLIMB, SETTLE, WEIGH, DONE = range(4)
STAGES = ("climbing to the mode", "settling", "weighing", "done")
PARTS = 16  # settling rounds with points of their own; then the first ones again
STILL, STILL_ENOUGH = (
    0.05,
    0.2,
)  # standard deviations that q may still move when it has settled: as the answer, as a proposal
FREEDOM = 15.0  # degrees of the Student t that points to be weighed are of
FAR = 3.0  # standard deviations of q at which its sides are looked at: on from there the t's own tail is wide enough
K_HAT = 0.7
LOST = 0.01  # share of the points at which clients find no mode, above which it is said
FEW = 10  # effective points for each global number, below which a proposal is kept as it is: they say too little of a covariance


@dataclass(frozen=True, eq=False)
class Points:
    """Standard points that server and clients have in common, so that a message need not hold them.

    Args:
        settling: standard normal, (PARTS, M, K).
        weighing: standard normal, (corrections, S, K).
        stretch: what makes the latter's rows a Student t's, (corrections, S, 1).
        seed: of all.
    """

    settling: Tensor
    weighing: Tensor
    stretch: Tensor
    seed: int

    def at(self, message: Tree) -> Tensor:
        """The points z (M, K) that a message asks for."""
        loc: Tensor = message["loc"]
        if "tril" not in message:
            return loc[None]
        if "right" in message:
            return _split(message).points(
                *(
                    v.index_select(0, message["part"][None])[0]
                    for v in (self.weighing, self.stretch)
                )
            )
        return loc + self.settling.index_select(0, message["part"][None])[0] @ message["tril"].T

    def along(self, message: Tree) -> Tensor:
        """The centre of q, and points on both sides of it along the columns of `tril`, (1 + 2 K, K); none if nothing is weighed."""
        loc, size = message["loc"], self.weighing.shape[-1]
        if not len(self.weighing):
            return torch.zeros(0, size, dtype=loc.dtype)
        columns = FAR * message["tril"].T
        return loc + torch.cat([torch.zeros(1, size, dtype=loc.dtype), columns, -columns])


def standard_points(size: int, *, settle: int, weigh: int, corrections: int, seed: int) -> Points:
    """Points in K = `size` dimensions: `settle` a settling round, `weigh` in each of the `corrections` weighing rounds."""
    halves = normal_points(PARTS * settle, size, seed=seed).view(2, PARTS, settle // 2, size)
    heavy = [
        heavy_points(weigh, size, freedom=FREEDOM, seed=seed + 1 + a) for a in range(corrections)
    ]
    weighing, stretch = (
        (torch.stack(v) for v in zip(*heavy, strict=True))
        if heavy
        else (torch.zeros(0, weigh, d) for d in (size, 1))
    )
    return Points(halves.transpose(0, 1).reshape(PARTS, settle, size), weighing, stretch, seed)


@dataclass(frozen=True, eq=False)
class Rounds:
    """What the server does with the sums of the clients' answers.

    Args:
        marginal: of the program; the server reads no more of it than the prior of the global sites.
        points: shared with the clients.
        enough: effective points that make another weighing round needless.
        start: where to climb from, site -> value.
        radius: of the first step, in standard deviations of the prior.
    """

    marginal: Marginal
    points: Points
    enough: int
    start: Mapping[str, Tensor | float]
    radius: float

    @cached_property
    def unit(self) -> Tensor:
        """One over the prior's standard deviations about its centre, (K,), never below 1/2: the unit of length."""
        with torch.no_grad(), pyro.validation_enabled(False):
            curvature = -self.marginal.prior(self.marginal.shared.start).hessian.diagonal()
        return curvature.nan_to_num(nan=0.0).clamp(min=0.25).sqrt()

    def begin(self) -> Tree:
        """Before the first round."""
        kept, count, size = self.points.weighing.shape
        block = self.marginal.shared
        values = {site.name: self.start.get(site.name, site.start) for site in block.sites}
        spread = {
            site.name: torch.as_tensor(values[site.name], dtype=site.start.dtype)
            for site in block.sites
        }
        at = block.flatten(
            {site.name: spread[site.name].expand(site.start.shape) for site in block.sites}
        )
        return {
            **settling(climbing(at.detach(), self.radius)),
            **_at(CLIMB, 0),
            "log_p": torch.zeros(kept, count),
            **{side: torch.ones(size) for side in ("right", "left")},
            "proposals": {
                "tril": torch.zeros(kept, size, size),
                **{name: torch.zeros(kept, size) for name in ("loc", "right", "left")},
            },
            "draws": torch.zeros(count, size),
            "k_hat": torch.tensor(torch.nan),
            "effective": torch.tensor(torch.nan),
        }

    def down(self, state: Tree, clock: Clock) -> Tree:
        """What clients evaluate next: one point, or points about q; structure alone says which."""
        stage = int(state["stage"])
        if stage == CLIMB:
            return {
                "loc": state["loc"],
                **({"first": torch.zeros(())} if _nothing_known(state) else {}),
            }
        message = {"loc": state["loc"], "tril": tril_of(state["precision"]), "part": state["part"]}
        return (
            {**message, "right": state["right"], "left": state["left"]}
            if stage == WEIGH
            else message
        )

    def update(self, state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        """The next state."""
        left = clock.rounds - clock.round - 1
        _tell_lost(int(state["stage"]), float(means["lost"]))
        with torch.no_grad(), pyro.validation_enabled(False):
            if int(state["stage"]) == WEIGH:
                state = self.weighed(state, means, left)
            else:
                state = self.moved(state, means, left)
        _tell(state, left)
        return tree_map(lambda v: v.detach().clone(), state)

    def found(self, state: Tree, means: dict[str, Tree], clock: Clock | None = None) -> Expansion:
        """The log posterior, averaged over the points of a state: the clients' sums and the prior."""
        at = self.points.at(self.down(state, Clock(0, 1)))
        prior = torch.vmap(self.marginal.prior)(at)
        sums = (
            means[name] * self.marginal.program.num_clients
            for name in ("log_marginal", "gradient", "hessian")
        )
        return Expansion(*(p.mean(0) + s for p, s in zip(prior, sums, strict=True)))

    def moved(self, state: Tree, means: dict[str, Tree], left: int) -> Tree:
        """After a round of climbing or settling."""
        corrections, found = len(self.points.weighing), self.found(state, means)
        if int(state["stage"]) == CLIMB:
            if bool(means["lost"] > 0.0):
                if _nothing_known(state):
                    raise ValueError(
                        f"at the start {float(means['lost']):.0%} of the clients find no mode of their own sites: start "
                        f"elsewhere (start=), or give those sites a prior that curves"
                    )
                found = found._replace(value=torch.full_like(found.value, -torch.inf))
            state = climbed(state, found, self.unit)
            arrived = bool(state["moved"] < 1.0)
            state = {
                **(settling(state) if arrived else state),
                **_at(SETTLE if arrived else CLIMB, 0),
            }
        else:
            part, seen = (int(state["part"]) + 1) % PARTS, self.sides(state, means)
            state = {**settled(state, found, self.unit), **_at(SETTLE, part), **seen}
            if bool(state["moved"] < (STILL_ENOUGH if corrections else STILL)):
                state = {**state, **_at(WEIGH if corrections else DONE, 0)}
        if corrections and left <= corrections:
            state = {**state, **_at(WEIGH, 0)}
        return state

    def sides(self, state: Tree, means: dict[str, Tree]) -> Tree:
        """How wide q is to be on either side, from the log posterior far out along its axes."""
        if not len(self.points.weighing):
            return {}
        at = self.points.along(self.down(state, Clock(0, 1)))
        log_p = (
            torch.vmap(self.marginal.log_prior)(at)
            + means["along"] * self.marginal.program.num_clients
        )
        right, left = sides(log_p[0] - log_p[1:], FAR).chunk(2)
        return {"right": right, "left": left}

    def weighed(self, state: Tree, means: dict[str, Tree], left: int) -> Tree:
        """After a round of weights: all points so far by the posterior over the mixture of the proposals they are of."""
        part, count = int(state["part"]), self.points.weighing.shape[1]
        now = _split(self.down(state, Clock(0, 1)))
        proposals, log_p = tree_map(torch.clone, state["proposals"]), state["log_p"].clone()
        for name, value in now._asdict().items():
            proposals[name][part] = value
        so_far = [_split({name: v[a] for name, v in proposals.items()}) for a in range(part + 1)]
        at = torch.cat(
            [
                q.points(self.points.weighing[a], self.points.stretch[a])
                for a, q in enumerate(so_far)
            ]
        )
        prior = torch.vmap(self.marginal.log_prior)(at[-count:])
        log_p[part] = prior + means["log_marginals"] * self.marginal.program.num_clients
        density = torch.stack([q.log_prob(at, FREEDOM) for q in so_far]).logsumexp(0)
        weights = smoothed(log_p[: part + 1].flatten() - density)
        again = (
            part + 1 < len(log_p)
            and left > 0
            and (weights.effective < self.enough or weights.k_hat >= K_HAT)
        )
        share = weights.log.exp()
        mean = share @ at
        covariance = (at - mean).T @ ((at - mean) * share[:, None])
        if weights.effective > FEW * len(mean):
            now = now.refitted(mean, covariance)
        return {
            **state,
            **_at(WEIGH if again else DONE, part + 1),
            "proposals": proposals,
            "log_p": log_p,
            "draws": resampled(at, weights.log, count),
            "loc": now.loc,
            "precision": torch.linalg.inv(now.tril @ now.tril.T),
            "right": now.right,
            "left": now.left,
            "k_hat": torch.tensor(weights.k_hat),
            "effective": torch.tensor(weights.effective),
        }

    def params(self, state: Tree) -> Params:
        """The guide's params: draws, or without corrections q."""
        corrections, count, size = self.points.weighing.shape
        if not corrections:
            return normal_params(state["loc"], state["precision"])
        if bool(state["effective"].isnan()):
            spread = normal_points(count, size, seed=self.points.seed)
            return {"_shared.points": state["loc"] + spread @ tril_of(state["precision"]).T}
        return {"_shared.points": state["draws"]}


def _split(message: Tree) -> Split:
    return Split(message["loc"], message["tril"], message["right"], message["left"])


def finished(state: Tree) -> bool:
    """Whether the posterior has settled, and is weighed."""
    return int(state["stage"]) == DONE


def logged(state: Tree) -> dict[str, float]:
    """The stage that comes next, how far q moved, eigenvalues raised, k-hat and effective points."""
    numbers = {
        name: float(state[name]) for name in ("stage", "moved", "raised", "k_hat", "effective")
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _at(stage: int, part: int) -> Tree:
    return {"stage": torch.tensor(stage), "part": torch.tensor(part)}


def _nothing_known(state: Tree) -> bool:
    return bool(state["value"].isneginf())


def _tell_lost(stage: int, lost: float) -> None:
    if stage != CLIMB and lost > LOST:
        warnings.warn(
            f"{STAGES[stage]}: at {lost:.1%} of the points clients find no mode of their own sites, so that the posterior is not to be "
            f"trusted where those lie: give the local sites priors that curve more, or take fedsvi with guides.structured",
            stacklevel=4,
        )


def _tell(state: Tree, left: int) -> None:
    """Say in plain words what a user should know before trusting the posterior."""
    stage = int(state["stage"])
    if stage == DONE and float(state["k_hat"]) >= K_HAT:
        warnings.warn(
            f"k-hat is {float(state['k_hat']):.2f}, above {K_HAT}: the Gaussian over the global sites misses a part of the "
            f"posterior that weights cannot make up for ({float(state['effective']):.0f} effective points). Do not trust tails and "
            f"spreads; allow more rounds, or take fedsvi with guides.conditional(shared=guides.spline_flow)",
            stacklevel=4,
        )
    if stage != DONE and left == 0:
        warnings.warn(
            f"the rounds ended while {STAGES[stage]}: the posterior is not what it would become; allow more rounds",
            stacklevel=4,
        )
