"""The server of FedLaplace: climb to the mode, settle q, weight its points."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hierfl.core.importance_sampling import (
    K_HAT,
    Split,
    heavy_points,
    normal_points,
    resampled,
    sides,
    smoothed,
)
from hierfl.core.trees import Tree, copied, tree_class, tree_map
from hierfl.core.user_warnings import warn
from hierfl.guides.global_sites import normal_params
from hierfl.laplace.marginal import Expansion, Marginal
from hierfl.laplace.newton import Ascent, tril_of
from hierfl.method import Clock, WeightedDraws
from hierfl.program.handlers import unchecked
from hierfl.program.program import Params
from hierfl.program.sites import LatentSite

PARTS = 16  # settling rounds with different points; after them the points repeat
# points of the first weighting round: 512 are enough for most posteriors with a small k-hat
FIRST = 512
FREEDOM = 15.0  # degrees of freedom of the Student t in the weighting stage
FAR = 3.0  # sds of q at which its sides are measured; beyond, the tail of the t is wide enough
CLIMB, SETTLE, WEIGHT, DONE = range(4)
STAGES = ("climbing to the mode", "settling", "weighting", "done")
# standard deviations that q may move when it has settled: as the answer, and as a proposal to weight
STILL, STILL_ENOUGH = 0.05, 0.2
LOST = 0.01  # fraction of points without a mode above which the server warns
RESERVED = 3  # rounds that are kept for weighting where the number of rounds is small, at most
FEW = 10  # effective points per global unknown below which the proposal is not refitted


@dataclass(frozen=True, eq=False)
class LaplacePoints:
    """Standard points that server and clients both compute, so that no message holds them."""

    settling: Tensor  # (PARTS, M, K), standard normal
    weighting: Tensor  # (S, K), standard normal, of one weighting round after another
    stretch: Tensor  # (S, 1), makes rows of `weighting` those of a Student t
    sizes: tuple[int, ...]  # of the weighting rounds
    seed: int

    def at(self, message: Tree) -> Tensor:
        """Return the points z (M, K) that a message asks for."""
        loc: Tensor = message["loc"]
        if "tril" not in message:
            return loc[None]
        if "right" in message:
            first = self._firsts.index_select(0, message["part"][None])
            rows = first + torch.arange(message["points"].shape[0])
            return split_of(message).points(
                self.weighting.index_select(0, rows), self.stretch.index_select(0, rows)
            )
        return loc + self.settling.index_select(0, message["part"][None])[0] @ message["tril"].T

    def weighted(self, part: int) -> tuple[Tensor, Tensor]:
        """Return the rows of `weighting` and `stretch` of one weighting round."""
        first = int(self._firsts[part])
        rows = slice(first, first + self.sizes[part])
        return self.weighting[rows], self.stretch[rows]

    @cached_property
    def _firsts(self) -> Tensor:
        """The row of `weighting` at which each weighting round begins, (rounds,)."""
        return torch.tensor([sum(self.sizes[:a]) for a in range(len(self.sizes))])

    def along(self, message: Tree) -> Tensor:
        """Return q's center and points on both sides along `tril`, (1 + 2 K, K), of weighting rounds."""
        loc, columns = message["loc"], FAR * message["tril"].T
        return loc + torch.cat([torch.zeros_like(loc)[None], columns, -columns])


def standard_points(size: int, *, settle: int, most: int, rounds: int, seed: int) -> LaplacePoints:
    """Return points in K = `size` dimensions; weighting rounds have `FIRST` to `most` points."""
    halves = normal_points(PARTS * settle, size, seed=seed).view(2, PARTS, settle // 2, size)
    sizes = tuple(min(most, FIRST << a) for a in range(rounds))
    heavy = [
        heavy_points(count, size, freedom=FREEDOM, seed=seed + 1 + a)
        for a, count in enumerate(sizes)
    ]
    weighting, stretch = (
        (torch.cat(v) for v in zip(*heavy, strict=True))
        if heavy
        else (torch.zeros(0, d) for d in (size, 1))
    )
    settling = halves.transpose(0, 1).reshape(PARTS, settle, size)
    return LaplacePoints(settling, weighting, stretch, sizes, seed)


def split_of(message: Tree) -> Split:
    """Return the two-sided Gaussian that a message describes."""
    return Split(message["loc"], message["tril"], message["right"], message["left"])


@tree_class
class LaplaceState:
    """The state of the server."""

    stage: Tensor  # (), of `STAGES`
    part: Tensor  # (), which points are next
    ascent: Ascent  # to the mode, then to q
    right: Tensor  # (K,), widths of q on its axes
    left: Tensor
    proposals: Split  # of each weighting round, (rounds, ...) each
    log_p: Tensor  # (rounds, S), log posterior at their points
    draws: Tensor  # (S, K)
    k_hat: Tensor  # ()
    effective: Tensor  # ()

    @property
    def is_done(self) -> bool:
        """Whether all stages are done."""
        return int(self.stage) == DONE

    def at(self, stage: int, part: int = 0) -> "LaplaceState":
        """Return the state at another stage."""
        return replace(self, stage=torch.tensor(stage), part=torch.tensor(part))

    def logged(self) -> dict[str, float]:
        """Return the next stage, q's move, raised eigenvalues, k-hat and effective points."""
        numbers = {
            "stage": self.stage,
            "moved": self.ascent.moved,
            "raised": self.ascent.raised,
            "k_hat": self.k_hat,
            "effective": self.effective,
        }
        return {name: float(v) for name, v in numbers.items() if math.isfinite(v)}

    def weighted(self) -> WeightedDraws | None:
        """Return k-hat and the effective number of the weighted points; None without a weighting stage."""
        k_hat, effective = float(self.k_hat), float(self.effective)
        return None if math.isnan(effective) else WeightedDraws(k_hat, effective)


@dataclass(frozen=True, eq=False)
class LaplaceRounds:
    """The server's part of a round, from the sums of the clients' updates."""

    marginal: Marginal  # of the program, for its prior of the global sites alone
    points: LaplacePoints
    target_ess: int
    count: int  # S, draws of the posterior, and the most points of a round
    start: Mapping[str, Tensor | float]  # where to climb from, site -> value
    radius: float  # largest length of the first step, in sds of the prior

    @cached_property
    def unit(self) -> Tensor:
        """Reciprocal prior sds about its center, (K,), at least 1/2: the unit of length."""
        with torch.no_grad(), unchecked():
            curvature = -self.marginal.prior(self.marginal.shared.start).hessian.diagonal()
        return curvature.nan_to_num(nan=0.0).clamp(min=0.25).sqrt()

    def begin(self) -> LaplaceState:
        """Return the state before the first round."""
        block, rounds, count = self.marginal.shared, len(self.points.sizes), self.count
        size, none = block.size, torch.zeros(rounds, block.size)

        def first(site: LatentSite) -> Tensor:
            value = torch.as_tensor(self.start.get(site.name, site.start), dtype=site.start.dtype)
            return value.expand(site.start.shape)

        at = block.flatten({site.name: first(site) for site in block.sites})
        state = LaplaceState(
            stage=torch.tensor(CLIMB),
            part=torch.tensor(0),
            ascent=Ascent.begin(at.detach(), self.radius),
            right=torch.ones(size),
            left=torch.ones(size),
            proposals=Split(loc=none, tril=torch.zeros(rounds, size, size), right=none, left=none),
            log_p=torch.zeros(rounds, count),
            draws=torch.zeros(count, size),
            k_hat=torch.tensor(torch.nan),
            effective=torch.tensor(torch.nan),
        )
        return copied(state)

    def down(self, state: LaplaceState, clock: Clock) -> Tree:
        """Return the message: one point, or points about q. Its keys say which."""
        stage, ascent = int(state.stage), state.ascent
        if stage == CLIMB:
            first = {} if ascent.has_begun else {"first": torch.zeros(())}
            return {"loc": ascent.loc, **first}
        message = {"loc": ascent.loc, "tril": tril_of(ascent.precision), "part": state.part}
        if stage != WEIGHT:
            return message
        # only the shape of "points" counts, known where a step is traced
        points = torch.zeros(self.points.sizes[int(state.part)], 0)
        return {**message, "right": state.right, "left": state.left, "points": points}

    def update(self, state: LaplaceState, means: dict[str, Tree], clock: Clock) -> LaplaceState:
        """Return the next state."""
        remaining = clock.rounds - clock.round - 1
        _warn_of_lost(int(state.stage), float(means["lost"]))
        with torch.no_grad(), unchecked():
            if int(state.stage) == WEIGHT:
                state = self.weighted(state, means, remaining)
            else:
                state = self.moved(state, means, remaining)
        _warn(state, remaining)
        return copied(state)

    def expansion(self, state: LaplaceState, means: dict[str, Tree]) -> Expansion:
        """Return the log posterior and its derivatives, averaged over the points."""
        at = self.points.at(self.down(state, Clock(0, 1)))
        prior = torch.vmap(self.marginal.prior)(at)
        count = self.marginal.program.num_clients
        sums = (means[name] * count for name in ("log_marginal", "gradient", "hessian"))
        return Expansion(*(p.mean(0) + s for p, s in zip(prior, sums, strict=True)))

    def moved(self, state: LaplaceState, means: dict[str, Tree], remaining: int) -> LaplaceState:
        """Return the state after a round of climbing or settling."""
        corrections, expansion = len(self.points.sizes), self.expansion(state, means)
        ascent = state.ascent
        if int(state.stage) == CLIMB:
            if bool(means["lost"] > 0.0):
                if not ascent.has_begun:
                    raise ValueError(
                        f"at the start {float(means['lost']):.0%} of the clients find no mode of "
                        "their local sites: start elsewhere (start=), or give those sites a prior that curves"
                    )
                expansion = expansion._replace(value=torch.full_like(expansion.value, -torch.inf))
            ascent = ascent.climbed(expansion, self.unit)
            arrived = bool(ascent.moved < 1.0)
            state = replace(state, ascent=ascent.settling() if arrived else ascent)
            state = state.at(SETTLE if arrived else CLIMB)
        else:
            right, left = self.sides(state, means)
            ascent = ascent.settled(expansion, self.unit)
            state = replace(state, ascent=ascent, right=right, left=left)
            state = state.at(SETTLE, (int(state.part) + 1) % PARTS)
            if bool(ascent.moved < (STILL_ENOUGH if corrections else STILL)):
                state = self.weighting(state, remaining) if corrections else state.at(DONE)
        if corrections and remaining <= min(corrections, RESERVED):
            state = self.weighting(state, remaining)
        return state

    def weighting(self, state: LaplaceState, remaining: int) -> LaplaceState:
        """Return the state at which weighting starts."""
        largest = self.points.sizes.index(max(self.points.sizes))
        return state.at(WEIGHT, min(max(0, largest + 1 - remaining), largest))

    def log_p(self, at: Tensor, mean: Tensor) -> Tensor:
        """Return the log posterior at points, (S,), from the clients' mean log marginal likelihood there."""
        prior: Tensor = torch.vmap(self.marginal.log_prior)(at)
        return prior + mean * self.marginal.program.num_clients

    def sides(self, state: LaplaceState, means: dict[str, Tree]) -> tuple[Tensor, Tensor]:
        """Return q's widths on both sides, from the log posterior far out on its axes."""
        if not self.points.sizes:
            return state.right, state.left
        at = self.points.along(self.down(state, Clock(0, 1)))
        log_p = self.log_p(at, means["along"])
        right, left = sides(log_p[0] - log_p[1:], FAR).chunk(2)
        return right, left

    def weighted(self, state: LaplaceState, means: dict[str, Tree], remaining: int) -> LaplaceState:
        """Return the state after all points so far were weighted over the mixture of proposals."""
        part, sizes = int(state.part), self.points.sizes
        now = split_of(self.down(state, Clock(0, 1)))
        proposals, log_p = tree_map(torch.clone, state.proposals), state.log_p.clone()
        for all_rounds, value in zip(proposals, now, strict=True):
            all_rounds[part] = value
        # the first parts are left out where few rounds were left
        used = [a for a in range(part + 1) if bool(proposals.tril[a].any())]
        so_far = [Split(*(v[a] for v in proposals)) for a in used]
        points = [q.points(*self.points.weighted(a)) for a, q in zip(used, so_far, strict=True)]
        log_p[part, : sizes[part]] = self.log_p(points[-1], means["log_marginals"])
        at = torch.cat(points)
        mixed = [(q, math.log(sizes[a] / sizes[part])) for a, q in zip(used, so_far, strict=True)]
        density = torch.stack([q.log_prob(at, FREEDOM) + s for q, s in mixed]).logsumexp(0)
        weights = smoothed(torch.cat([log_p[a, : sizes[a]] for a in used]) - density)
        good = weights.effective >= self.target_ess and weights.k_hat < K_HAT
        again = part + 1 < len(sizes) and remaining > 0 and not good
        share = weights.log.exp()
        mean = share @ at
        covariance = (at - mean).T @ ((at - mean) * share[:, None])
        if weights.effective > FEW * len(mean):
            now = now.refitted(mean, covariance)
        precision = torch.linalg.inv(now.tril @ now.tril.T)
        return replace(
            state.at(WEIGHT if again else DONE, part + 1),
            proposals=proposals,
            log_p=log_p,
            draws=resampled(at, weights.log, self.count),
            ascent=replace(state.ascent, loc=now.loc, precision=precision),
            right=now.right,
            left=now.left,
            k_hat=torch.tensor(weights.k_hat),
            effective=torch.tensor(weights.effective),
        )

    def params(self, state: LaplaceState) -> Params:
        """Return the guide's params: the draws, or q if there is no weighting stage."""
        loc, precision = state.ascent.loc, state.ascent.precision
        if not self.points.sizes:
            return normal_params(loc, precision)
        if bool(state.effective.isnan()):
            spread = normal_points(self.count, len(loc), seed=self.points.seed)
            return {"_shared.points": loc + spread @ tril_of(precision).T}
        return {"_shared.points": state.draws}


def _warn_of_lost(stage: int, lost: float) -> None:
    if stage != CLIMB and lost > LOST:
        warn(
            f"{STAGES[stage]}: at {lost:.1%} of the points clients find no mode of their local "
            "sites. Do not trust the posterior near those points: give the local sites priors that "
            "curve more, or use fedsvi with guides.structured",
        )


def _warn(state: LaplaceState, remaining: int) -> None:
    """Warn if the posterior is unreliable: k-hat is high, or rounds ended too early."""
    if state.is_done and float(state.k_hat) >= K_HAT:
        warn(
            f"k-hat is {float(state.k_hat):.2f}, above {K_HAT}: the Gaussian over the global "
            "sites misses a part of the posterior, and weights cannot correct for it "
            f"({float(state.effective):.0f} effective points). Do not trust tails and spreads: "
            "allow more rounds, or use fedsvi with guides.conditional(shared=guides.spline_flow)",
        )
    if not state.is_done and remaining == 0:
        warn(
            f"the rounds ended while {STAGES[int(state.stage)]}: the posterior is not final; allow more rounds",
        )
