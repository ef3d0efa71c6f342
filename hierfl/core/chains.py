"""Hamiltonian Monte Carlo of a density on R^K with many chains side by side, as one batch.

Chains share a step size, a trajectory length and a whitening matrix, adapted during a warm-up.
Trajectories do not pass from mode to mode, and jumps do: every few iterations each chain proposes the
leading coordinates from a wide Student t, whatever they are now, or another mode of those that are known.

Sources: Neal 2011, arXiv:1206.1901; dual averaging of the step size, Hoffman and Gelman 2014, JMLR
15; adaptation across many chains, Hoffman, Radul and Sountsov 2021, AISTATS; rank-normalized R-hat,
Vehtari et al. 2021, Bayesian Analysis 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

from hierfl.core.process import working

# (C, K) -> log density (C,) and gradient (C, K)
Density = Callable[[Tensor], tuple[Tensor, Tensor]]

ACCEPT = 0.8  # fraction of trajectories to be accepted, as Hoffman and Gelman
LENGTH = math.pi / 2.0  # mean length of a trajectory: a quarter turn of a standard normal
MOST_STEPS = 32  # of a trajectory
LEAPS = 8  # gradients a trajectory, by which the work of two kinds of chains is compared
BY_ROOT = 0.25  # gradients of one after the first, by the root of how many scalars move
WINDOWS = (0.2, 0.4, 0.6, 0.8)  # parts of the warm-up after which the whitening is renewed
SHORT, OFTEN = 0.125, 4  # of a step, and one such trajectory in so many
LEAST_ACCEPTED = 0.3  # mean chance of a trajectory to be accepted, below which chains do not fit
SLOW = 16  # steps of a trajectory that is long
TRIAL = 4  # part of the least iterations that chains of such trajectories have on trial
MOVES = 0.1  # share of accepted trajectories below which a chain is stuck
TAIL = 1.645  # normal score of the 95% point
JUMPS, FREEDOM, WIDER = 2, 5.0, 1.5  # iterations from jump to jump; the t, in whitened coordinates
MOST_JUMPING = 12  # leading coordinates: of more no jump is accepted
JUDGED = 1024  # states whose numbers are computed together
# states that a whitening matrix is shrunk by, as Stan's, and for each scalar of a matrix: of few states,
# some direction looks far narrower than it is
SHRINK, BY_SCALAR = 10, 2


class Whitening(NamedTuple):
    """Coordinates x with z = loc + A x, in which the density is nearly standard normal.

    A is a triangular matrix of the leading D coordinates, and a scale of each of the others.
    """

    loc: Tensor  # (K,)
    tril: Tensor  # (D, D), lower triangular
    scale: Tensor  # (K - D,)

    def at(self, x: Tensor) -> Tensor:
        """Return z (..., K) at x (..., K)."""
        return self.loc + self._by(x, self.tril.mT)

    def back(self, z: Tensor) -> Tensor:
        """Return x (C, K) at z (C, K)."""
        leading, other = (z - self.loc).tensor_split([len(self.tril)], 1)
        leading = torch.linalg.solve_triangular(self.tril, leading.mT, upper=False).mT
        return torch.cat([leading, other / self.scale], 1)

    def slope(self, slope: Tensor) -> Tensor:
        """Return the gradient in x (C, K) of that in z (C, K)."""
        return self._by(slope, self.tril)

    def _by(self, x: Tensor, matrix: Tensor) -> Tensor:
        if not len(self.scale):
            return x @ matrix
        leading, other = x.tensor_split([len(matrix)], -1)
        return torch.cat([leading @ matrix, other * self.scale], -1)


class Mode(NamedTuple):
    """A Normal distribution about a mode: of D leading numbers, and of N E others given these.

    The others are independent between N groups; K = D + N E.
    """

    loc: Tensor  # (K,)
    tril: Tensor  # (D, D), of the leading ones' covariance
    slopes: Tensor  # (N, E, D), of the others' means in the leading ones
    own_tril: Tensor  # (N, E, E), of the others' covariance given these

    @property
    def volume(self) -> float:
        """The log of the product of sds."""
        both = (of.diagonal(dim1=-2, dim2=-1).log().sum() for of in (self.tril, self.own_tril))
        return float(sum(both))

    @property
    def leading(self) -> Whitening:
        """The distribution of the leading numbers."""
        size = len(self.tril)
        return Whitening(self.loc[:size], self.tril, self.loc[:0])

    def at(self, x: Tensor) -> Tensor:
        """Return z (C, K) at standard normal x (C, K)."""
        leading, own = self._parts(x)
        away = leading @ self.tril.mT
        own = (self.slopes @ away[:, None, :, None] + self.own_tril @ own)[..., 0]
        return self.loc + torch.cat([away, own.flatten(1)], 1)

    def gain(self, slope: Tensor) -> float:
        """Return by how much the log density is expected to rise beyond `loc`, of a slope (K,) there: 0 at a mode."""
        size = len(self.tril)
        leading, own = slope[:size], slope[size:].view(self.own_tril.shape[:2])
        leading = leading + (own[..., None] * self.slopes).sum((0, 1))
        ahead = self.tril.mT @ leading, (own[:, None] @ self.own_tril).flatten()
        return 0.5 * float(torch.cat(ahead).square().sum())

    def back(self, z: Tensor) -> Tensor:
        """Return x (C, K) at z (C, K)."""
        away, own = self._parts(z - self.loc)
        own = own - self.slopes @ away[:, None, :, None]
        own = torch.linalg.solve_triangular(self.own_tril, own, upper=False)[..., 0]
        return torch.cat([self.leading_back(z), own.flatten(1)], 1)

    def leading_back(self, z: Tensor) -> Tensor:
        """Return the leading numbers of x, (C, D), at those of z, (C, D...)."""
        size = len(self.tril)
        away = (z[:, :size] - self.loc[:size]).mT
        return torch.linalg.solve_triangular(self.tril, away, upper=False).mT

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        leading, own = x.tensor_split([len(self.tril)], 1)
        return leading, own.reshape(len(x), *self.own_tril.shape[:2], 1)


class Sampled(NamedTuple):
    """Draws of a density."""

    draws: Tensor  # (S, K)
    r_hat: float  # the largest split R-hat of the judged numbers
    effective: float  # the least number of effective states of one of them
    spread: tuple[float, float]  # the largest of squares, and relative error of an sd
    whitening: Whitening  # as adapted
    size: float  # of a step
    steps: Tensor  # (n, C, K), states of all chains
    numbers: Tensor  # (n, C, J), what is judged of them
    leaps: float  # gradients an iteration


class _State(NamedTuple):
    """Where the chains are: x (C, K), log density (C,), gradient in x (C, K)."""

    at: Tensor
    value: Tensor
    slope: Tensor


class _Step:
    """Dual averaging of the log step size toward a fraction of accepted trajectories."""

    def __init__(self, first: float) -> None:
        self.center, self.error, self.count = math.log(first), 0.0, 0
        self.log, self.mean = math.log(first), math.log(first)

    def update(self, accepted: float) -> None:
        self.count += 1
        self.error += (ACCEPT - accepted - self.error) / (self.count + 10.0)
        self.log = self.center - self.error * math.sqrt(self.count) / 0.2
        share = self.count**-0.75
        self.mean = share * self.log + (1.0 - share) * self.mean


def leaps_of(size: int) -> float:
    """Return about how many gradients a trajectory of so many scalars takes."""
    return min(float(MOST_STEPS), 1.0 + BY_ROOT * size**0.5)


def sampled(
    density: Density,
    start: Tensor,
    whitening: Whitening,
    *,
    draws: int,
    warmup: int,
    least: int,
    seed: int,
    jumps: bool,
    judged: Callable[[Tensor], Tensor] = lambda z: z,
    before: Sampled | None = None,
    warmed: Callable[[float], None] = lambda leaps: None,
    on_trial: bool = False,
    were_held: bool = False,
    modes: Sequence[Mode] = (),
) -> Sampled:
    """Return S = `draws` of a density over all chains, which start at `start` (C, K).

    Mixing and errors are those of the numbers `judged` (C, J) of the states (C, K). Chains `before`
    go on as they were, with their draws. `warmed` is told how many gradients an iteration takes.
    Chains `on_trial` end early where after half of the warm-up a trajectory is long. Where some
    `were_held`, some trajectories are of short steps, which the steepest places take. Jumps are between
    `modes` where there are some.
    """
    jumps = jumps and 0 < len(whitening.tril) <= MOST_JUMPING

    def jumped(state: _State, whitening: Whitening) -> _State:
        if modes:
            return _passed(density, state, whitening, modes, g)
        return _jumped(density, state, whitening, g)

    g = torch.Generator().manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
    renew_at = {round(part * warmup) for part in WINDOWS}
    step, z = _Step(1.0 / max(1.0, start.shape[1]) ** 0.25), start
    state, seen = _evaluated(density, z, whitening), []
    moves = torch.zeros(len(start))
    total = warmup + max(least, -(-draws // len(start)))
    for i in range(warmup):
        working(f"chains, iteration {i} of {total}")
        state, taken, accepted = _iterated(density, state, whitening, math.exp(step.log), g)
        if jumps and i % JUMPS == 0:
            state = jumped(state, whitening)
        step.update(accepted)
        moves = moves + taken
        seen.append(whitening.at(state.at))
        if i + 1 in renew_at:
            alive = _alive(moves / len(seen), g)
            seen = [z[alive] for z in seen]
            whitening = _renewed(torch.cat(seen[len(seen) // 3 :]), whitening, modes)
            state = _evaluated(density, seen[-1], whitening)
            if on_trial and 2 * (i + 1) > warmup and math.exp(step.mean) * SLOW < LENGTH:
                total = i + 1 + least // TRIAL
                warmup = i + 1
                break
            step, seen, moves = _Step(math.exp(step.mean)), [], torch.zeros(len(start))
    size = math.exp(step.mean) if before is None else before.size
    leaps = min(MOST_STEPS, max(1.0, LENGTH / size)) + (1 / JUMPS if jumps else 0.0)
    warmed(leaps)
    moves, accepted = torch.zeros(len(start)), 0.0
    steps: list[Tensor] = []
    for i in range(warmup, total):
        working(f"chains, iteration {i} of {total}")
        is_short = were_held and i % OFTEN == 0
        state, taken, chance = _iterated(density, state, whitening, size, g, short=is_short)
        if jumps and i % JUMPS == 0:
            state = jumped(state, whitening)
        moves, accepted = moves + taken, accepted + (0.0 if is_short else chance)
        steps.append(whitening.at(state.at))
    # a single chain that never moves hardly shows in R-hat
    whole = len(steps) * (OFTEN - 1) // OFTEN if were_held else len(steps)
    held = bool((moves < MOVES * len(steps)).any()) or accepted < LEAST_ACCEPTED * whole
    states = torch.stack(steps)
    parts = [judged(z) for z in states.flatten(0, 1).split(JUDGED)]
    numbers = torch.cat(parts).unflatten(0, states.shape[:2])
    if before is not None:
        states = torch.cat([before.steps, states])
        numbers = torch.cat([before.numbers, numbers])
    together, chains = states.flatten(0, 1), numbers.movedim(0, 1)
    together = thinned(together, draws)
    r_hat, effective = mixing_of(chains)
    r_hat = math.inf if held else r_hat
    known = (r_hat, effective, spread_of(chains), whitening)
    return Sampled(together, *known, size, states, numbers, leaps)


def whitening_of(states: Tensor, dense: int) -> Whitening:
    """Return the whitening by moments of states (n, K), the leading `dense` scalars by their covariance."""
    covariance = states[:, :dense].mT.cov() + 1e-9 * torch.eye(dense)
    tril = torch.linalg.cholesky_ex(covariance).L
    return Whitening(states.mean(0), tril, states.std(0)[dense:])


def thinned(draws: Tensor, count: int) -> Tensor:
    """Return so many of some draws, evenly spread over them."""
    return draws[torch.linspace(0, len(draws) - 1, count).round().long()]


def mixing_of(chains: Tensor) -> tuple[float, float]:
    """Return the largest split R-hat of chains (C, n, K) and the least effective number, by ranks.

    R-hat is that of normal scores and of folded ones, of distances from the median, which see tails
    that only some chains reach. Effective numbers are those of normal scores, of their squares, and
    of the tails of 5%.
    """
    folded = (chains - chains.flatten(0, 1).median(0).values).abs()
    chains = _normal_scores(chains)
    both = torch.cat([chains, _normal_scores(folded)], 2)
    worst: float = split_gelman_rubin(both).nan_to_num(nan=1.0).max().item()
    of = [chains, chains.square(), *((chains < sign * TAIL).to(chains) for sign in (-1.0, 1.0))]
    count = float(len(chains.flatten(0, 1)))
    effective = effective_sample_size(torch.cat(of, 2), 0, 1).nan_to_num(nan=count)
    return worst, float(effective.min()) if effective.numel() else count


def _normal_scores(chains: Tensor) -> Tensor:
    """Return the normal scores of the ranks among all states of chains (C, n, K)."""
    flat = chains.flatten(0, 1)
    ranks = flat.argsort(0).argsort(0).to(flat.dtype)
    return torch.special.ndtri((ranks + 0.625) / (len(flat) + 0.25)).view(chains.shape)


def spread_of(chains: Tensor) -> tuple[float, float]:
    """Return the largest split R-hat of squares of chains (C, n, K), and relative error of an sd.

    By their values: ranks hardly show a mode of little mass, far away, on which sds rest.
    """
    if not chains.numel():
        return 1.0, 0.0
    squares = (chains - chains.mean((0, 1))).square()
    relative = squares.var((0, 1)) / squares.mean((0, 1)).square()
    errors = 0.5 * (relative / effective_sample_size(squares, 0, 1)).sqrt()
    r_hat = split_gelman_rubin(squares).nan_to_num(nan=1.0)
    return float(r_hat.max()), float(errors.nan_to_num().max())


def _evaluated(density: Density, z: Tensor, whitening: Whitening) -> _State:
    return _at(density, whitening.back(z), whitening)


def _at(density: Density, at: Tensor, whitening: Whitening) -> _State:
    value, slope = density(whitening.at(at))
    bad = ~(value.isfinite() & slope.isfinite().all(1))
    value = torch.where(bad, -torch.inf, value)
    return _State(at, value, whitening.slope(torch.where(bad[:, None], 0.0, slope)))


def _iterated(
    density: Density,
    state: _State,
    whitening: Whitening,
    size: float,
    g: torch.Generator,
    *,
    short: bool = False,
) -> tuple[_State, Tensor, float]:
    """Take one trajectory of every chain; also which moved (C,), and the mean acceptance."""
    length = LENGTH * (0.4 + 1.2 * float(torch.rand((), generator=g)))
    steps = min(MOST_STEPS, max(1, round(length / size)))
    size = SHORT * size if short else size
    momentum = torch.randn(state.at.shape, generator=g, dtype=state.at.dtype)
    now, speed = state, momentum
    for _ in range(steps):
        speed = speed + 0.5 * size * now.slope
        now = _at(density, now.at + size * speed, whitening)
        speed = speed + 0.5 * size * now.slope
    gain = now.value - state.value
    gain = gain - 0.5 * (speed.square().sum(1) - momentum.square().sum(1))
    return _accepted(state, now, gain, g)


def _accepted(
    state: _State, proposed: _State, gain: Tensor, g: torch.Generator
) -> tuple[_State, Tensor, float]:
    """Take proposals with probability e^gain (C,); also which were taken, and the mean acceptance."""
    chance = gain.nan_to_num(nan=-torch.inf).clamp(max=0.0).exp()
    taken = torch.rand(chance.shape, generator=g, dtype=chance.dtype) < chance
    which = (taken[:, None], taken, taken[:, None])
    chosen = (torch.where(*of) for of in zip(which, proposed, state, strict=True))
    return _State(*chosen), taken.to(chance.dtype), float(chance.mean())


def _jumped(density: Density, state: _State, whitening: Whitening, g: torch.Generator) -> _State:
    """Propose the leading coordinates of every chain from a wide Student t."""
    dense, now = len(whitening.tril), whitening.at(state.at)
    count, tril = len(now), WIDER * whitening.tril
    normal = torch.randn(count, dense, generator=g, dtype=now.dtype)
    square = torch.randn(count, int(FREEDOM), generator=g, dtype=now.dtype).square().mean(1)
    away = normal / square.sqrt()[:, None]
    there = torch.cat([whitening.loc[:dense] + away @ tril.mT, now[:, dense:]], 1)
    jumped = _evaluated(density, there, whitening)

    def log_q(z: Tensor) -> Tensor:
        x = torch.linalg.solve_triangular(
            tril, (z[:, :dense] - whitening.loc[:dense]).mT, upper=False
        )
        return -0.5 * (FREEDOM + dense) * (x.square().sum(0) / FREEDOM).log1p()

    gain = jumped.value - state.value + log_q(now) - log_q(there)
    return _accepted(state, jumped, gain, g)[0]


def _passed(
    density: Density, state: _State, whitening: Whitening, modes: Sequence[Mode], g: torch.Generator
) -> _State:
    """Propose for every chain another mode, where it has the standard scores that it has at the nearest."""
    now, count = whitening.at(state.at), len(modes)
    here, chain = _nearest(now, modes), torch.arange(len(now))
    other = (here + torch.randint(1, count, (len(now),), generator=g)) % count
    x = torch.stack([mode.back(now) for mode in modes])[here, chain]
    there = torch.stack([mode.at(x) for mode in modes])[other, chain]
    passed = _evaluated(density, there, whitening)
    volume = torch.tensor([mode.volume for mode in modes])
    gain = passed.value - state.value + volume[other] - volume[here]
    gain = torch.where(_nearest(there, modes) == other, gain, -torch.inf)
    return _accepted(state, passed, gain, g)[0]


def _nearest(z: Tensor, modes: Sequence[Mode]) -> Tensor:
    """Return which mode is nearest, by its sds, to states z (C, K), (C,) int64."""
    return torch.stack([mode.leading_back(z).norm(dim=1) for mode in modes]).argmin(0)


def _alive(share: Tensor, g: torch.Generator) -> Tensor:
    """Return which chain each chain continues from, (C,) int64: not one stuck in a steep tail."""
    index = torch.arange(len(share))
    moving = index[share >= MOVES]
    if len(moving) in (0, len(share)):
        return index
    others = moving[torch.randint(len(moving), (len(share),), generator=g)]
    return torch.where(share >= MOVES, index, others)


def _renewed(states: Tensor, before: Whitening, modes: Sequence[Mode]) -> Whitening:
    """Return the whitening by moments of states (n, K) about their modes: beyond the leading ones, variances."""
    loc, count, size = states.mean(0), len(states), len(before.tril)
    centers = torch.stack([mode.loc for mode in modes])[_nearest(states, modes)] if modes else loc
    away = states - centers
    leading, other = away.tensor_split([size], 1)
    shrink = SHRINK + BY_SCALAR * size
    covariance = leading.mT @ leading + shrink * (before.tril @ before.tril.mT)
    variance = other.square().sum(0) + SHRINK * before.scale.square()
    tril, info = torch.linalg.cholesky_ex(covariance / (count + shrink))
    return before if bool(info) else Whitening(loc, tril, (variance / (count + SHRINK)).sqrt())
