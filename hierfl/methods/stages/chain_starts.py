"""Where chains on the rows start, and by which factors clients' own scalars are standardized.

Factors are about the mode of the joint density that has the most mass, of those that are reached
from draws of the rounds and of the priors and from near 0: rounds that did not end may have kept to
a lesser one. The mode is looked for in what factors standardize; once chains have run, factors are
about their draws. Factors are left whose density is far lower than without them: where a vague scale
lets clients' scalars run away, they are about points that no draw is near.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.chains import MOST_JUMPING, Mode, Whitening, thinned, whitening_of
from hierfl.core.gaussians import Factor
from hierfl.methods.stages.centering import Centering, ScaledPoint
from hierfl.methods.stages.joint import Joint, Standard, standard_of
from hierfl.methods.stages.modes import (
    Bends,
    Slopes,
    bends,
    climbed,
    climbed_at_once,
    normal_about,
)
from hierfl.optimizers import Adam
from hierfl.summaries.factor import factor_of, q_of
from hierfl.summaries.growth import Growth, at_origin, moving
from hierfl.summaries.moving import line_of
from hierfl.summaries.reading import QuadratureNodes
from hierfl.summaries.surrogate import any_client, prior_draws

# moves to the mode of the scales, of which each is at most so long at first, and shorter each time
MOVES, FARTHEST_MOVE, SHORTER = 8, 0.5, 0.7
TRIES = 20  # points for each chain, of which it starts at a usable one
# points of each kind for each chain, from the likeliest of which modes are looked for; evaluations of
# climbs there, and their longest moves; modes that are compared, and how far points are apart that lead there
POINTS, ASCENT, LONGEST, MODES, DISTANT = 5, 60, 1.0, 3, 0.5
FIRST, LENGTH = 40, 0.1  # steps before these, and their length
# sds that modes are apart at least, and nats of their mass that the others may have less
FAR, LESS = 4.0, 3.0
RISE = 1.0  # nats by which the density may still rise beyond a mode
NOWHERE_FINITE = (
    "the joint log density is not finite at any draw of the priors, nor near 0: check the scales of "
    "the priors and what the model computes from their draws"
)
# sds by the prior between which the density of clients' scalars is averaged, in a second search for
# modes: where these can fit all rows, a noise's scale of 0 has an infinite density, and no mass
APART = 0.3
AWAY = 0.5  # sd of points about 0
WIDE = 3.0  # sds about the mode from which every second chain starts: R-hat then sees another mode
FARTHEST = 5.0  # sds of the belief that a client's factor may move its scalars
LARGEST = 1e15  # of a number of a client's factor, which wide beliefs may overflow
FEW = 4  # draws of z by which clients locate their mixing variables, for each number of z
RENEWING = 256  # draws of chains about which factors are
SCALED = 300  # numbers, with those that they scale, of whose scales a mode is looked for
ELSEWHERE = 1.0  # sds by the prior between a client's scalars at modes that no factor serves both
NEAR = 0.1  # sd of scalars about their mode where they are standardized by no factor
# nats below the highest density at which a point is usable: for each scalar, and in all
NATS, MORE = 5.0, 10.0


class ChainStart(NamedTuple):
    """Where chains start, and the coordinates they run in."""

    standard: Standard
    points: Tensor  # (C, K + N E)
    whitening: Whitening
    modes: tuple[Mode, ...] = ()  # about which chains start

    def misses(self, x: Tensor) -> bool:
        """Return whether no draw is near one of these modes; draws x (S, K) are in these coordinates."""
        farthest = FAR + math.sqrt(x.shape[1])
        return any(bool(of.leading_back(x).norm(dim=1).min() > farthest) for of in self.modes)


@dataclass(frozen=True, eq=False)
class ChainStarts:
    """Starts of C chains of a joint density of z (K,) and clients' scalars e (N, E)."""

    joint: Joint
    nodes: QuadratureNodes
    seed: int

    def heaviest(self, draws_z: Tensor) -> ChainStart:
        """Return the start with the most mass about it; modes are looked for from draws of z (S, K).

        Chains start in equal numbers about modes far apart of nearly as much mass.
        """
        alone = self.alone(draws_z)
        modes = self.modes(alone, draws_z)
        start, mode = self._about_mode(alone, draws_z, modes[0])
        if len(modes) > 1 and self.joint.shared <= MOST_JUMPING:  # chains pass between them
            return self._about_modes(alone, modes, start)
        other = self._about_scales(alone, mode)
        return start if other is None else max(start, other, key=self._mass_about)

    def _about_modes(self, alone: Standard, modes: list[Mode], start: ChainStart) -> ChainStart:
        """Return a start about several modes, one of which may be that of `start`."""
        shared = self.joint.shared
        own = torch.stack([of.loc[shared:] for of in modes])
        if bool(((own - own[0]).abs() > ELSEWHERE).any()):
            # factors about one mode do not suit the others
            scale = torch.ones(own.shape[1])
            whitening = modes[0].leading._replace(loc=modes[0].loc, scale=scale)
            start = ChainStart(alone, start.points, whitening)
        points, back = start.points.clone(), start.standard.centering.back
        noise = NEAR * torch.nn.functional.pad(self._normal(own.shape[1]), (shared, 0))
        for k, of in enumerate(modes):
            z = back(self._spread(of.leading, alone, of.loc)[: self.joint.count])
            near = self._with_own(z, start.standard) + noise
            points[k :: len(modes)] = near[k :: len(modes)]
        z = back(torch.stack([of.loc[:shared] for of in modes]))
        return start._replace(points=points, modes=self.modes_at(z, start.standard))

    def modes_at(self, z: Tensor, standard: Standard) -> tuple[Mode, ...]:
        """Return modes whose z (M, K) are known."""
        slopes = self._slopes(standard, self.joint.size)
        ends = self._with_own(z, standard)
        return tuple(normal_about(at, self._bends(slopes, at)) for at in ends)

    def _with_own(self, z: Tensor, standard: Standard) -> Tensor:
        """Return points at z (S, K) with clients' scalars at their mode there, (S, K + N E)."""
        x = torch.nn.functional.pad(z, (0, self.joint.size - self.joint.shared))
        is_own = torch.arange(self.joint.size) >= self.joint.shared

        def density(x: Tensor) -> tuple[Tensor, Tensor]:
            value, slope = self.joint.at(x, standard)
            return value, slope * is_own

        return climbed_at_once(density, x, ASCENT)[0] if self.joint.has_own else x

    def modes(self, alone: Standard, draws_z: Tensor) -> list[Mode]:
        """Return the mode of most mass, and those far from it of nearly as much, that climbs reach."""
        highest = self._ascended(alone, draws_z)
        reached = [self._mode_at(alone, x) for x in highest]
        (first, most, rise), *others = sorted(reached, key=lambda of: -of[1])
        modes = [first]
        for of, mass, left in others:
            # where a noise of 0 has an infinite density, no climb ends
            is_mode = rise < RISE and left < RISE
            if is_mode and mass > most - LESS and all(_are_apart(of, one) for one in modes):
                modes.append(of)
        return modes

    def _about_mode(
        self, alone: Standard, draws_z: Tensor, first: Mode
    ) -> tuple[ChainStart, Tensor]:
        """Return a start about a mode, or about one with clients' scalars apart, and that mode."""
        shared = self.joint.shared
        modes = [first]
        if self.joint.has_own:
            highest = self._ascended(alone, draws_z, APART)[0]
            modes.append(self._mode_at(alone, highest)[0])
        reached = [self._reached(alone, of) for of in modes]
        (mode, of_z, near), standard, _ = max(reached, key=lambda of: of[-1])
        by_none = alone, mode, of_z, near
        # again, by factors about the mode by factors
        is_shared = torch.arange(len(mode)) < shared
        narrowed = partial(self._narrowed, standard=standard)
        at = climbed(narrowed, torch.where(is_shared, mode, 0.0))
        of_z = self._normal_about(standard, at).leading
        near = self._spread(of_z, standard, at)
        standard, at = self._about(self.joint.z_of(near, standard)), torch.where(is_shared, at, 0.0)
        own = self._normal(len(at) - shared)
        points = torch.cat([near[: self.joint.count], at[shared:] + own], 1)
        if self._are_usable(standard, points, alone, mode):
            wide = self._spread(of_z._replace(tril=WIDE * of_z.tril), standard, at)
            points[1::2, :shared] = wide[1 : self.joint.count : 2]
        else:
            standard, at, of_z, near = by_none
            points = torch.cat([near[: self.joint.count], at[shared:] + NEAR * own], 1)
        of_all = of_z._replace(loc=at, scale=torch.ones(len(at) - shared))
        return ChainStart(standard, points, of_all), mode

    def about_draws(self, draws: Tensor, standard: Standard) -> ChainStart | None:
        """Return a start about draws (S, K + N E) by a `standard`; None where new factors fit worse."""
        shared, own = self.joint.shared, self.joint.size - self.joint.shared
        z = self.joint.z_of(draws, standard)
        renewed = self._about(thinned(z, RENEWING))
        x = self.joint.x_of(z, renewed)
        centering = self._centering(renewed, x.mean(0), x.std(0))
        renewed, x = renewed._replace(centering=centering), centering.back(x)
        there = torch.cat([thinned(x, self.joint.count), self._normal(own)], 1)
        if not self._are_usable(renewed, there, standard, thinned(draws, self.joint.count)):
            return None
        of_z = whitening_of(x, shared)
        loc = torch.cat([of_z.loc, torch.zeros(own)])
        return ChainStart(renewed, there, of_z._replace(loc=loc, scale=torch.ones(own)))

    def _are_usable(self, new: Standard, there: Tensor, old: Standard, here: Tensor) -> bool:
        """Return whether a new standard's points have a density as high as an old one's, about."""
        after = self.joint.at(there.view(-1, self.joint.size), new)[0].nan_to_num(nan=-torch.inf)
        before = self.joint.at(here.view(-1, self.joint.size), old)[0]
        return bool(after.median() >= before.median() - NATS * self.joint.size - MORE)

    def _reached(
        self, alone: Standard, of: Mode
    ) -> tuple[tuple[Tensor, Whitening, Tensor], Standard, float]:
        """Return a mode with points about it, factors there, and what density these points then have."""
        near = self._spread(of.leading, alone, of.loc)
        standard, x = self._about(self.joint.z_of(near, alone)), near[: self.joint.count]
        points = torch.cat([x, self._normal(self.joint.size - self.joint.shared)], 1)
        typical = self.joint.at(points, standard)[0].nan_to_num(nan=-torch.inf).median()
        return (of.loc, of.leading, near), standard, float(typical)

    def alone(self, z: Tensor) -> Standard:
        """Return scales by the prior alone, about draws of z (S, K)."""
        none = self.joint.none
        return self._standard(none.precision, none.shift, z)

    def _standard(
        self, precision: Tensor, shift: Tensor, z: Tensor, growth: Growth | None = None
    ) -> Standard:
        few, hierarchy = z[:: max(1, len(z) // (FEW * (1 + z.shape[1])))], self.joint.hierarchy
        line = line_of(hierarchy, few, self.joint.none.fields, (precision, shift))
        return standard_of(precision, shift, line, hierarchy.reading.own_size, growth)

    def _about(self, z: Tensor) -> Standard:
        """Return clients' scales by their factors about draws of z (S, K)."""
        rows, size = self.joint.rows, self.joint.hierarchy.reading.own_size
        equal = torch.full((len(z),), -math.log(len(z)))
        belief = any_client(self.joint.surrogate, z, equal, self.joint.none)
        if size and moving(rows.line, size):
            factor, growth = _plausible(*at_origin(rows, self.nodes, belief, self._factor, size))
            if bool(growth.moves.any()):
                return self._standard(factor.precision, factor.shift, z, growth)
        factor = self._factor(belief)
        return self._standard(factor.precision, factor.shift, z)

    def _factor(self, belief: tuple[Tensor, Tensor]) -> Factor:
        """Return clients' factors about a belief, m (V,) and C (V, V)."""
        none, rows = self.joint.none, self.joint.rows
        before = Factor(none.precision, none.shift, torch.zeros(rows.clients))
        unknown = torch.zeros(rows.clients, dtype=torch.bool)
        own = factor_of(rows, belief, self.nodes, before, unknown)
        prior = torch.linalg.inv_ex(belief[1]).inverse
        away = q_of((belief[0], prior), own)[0] - belief[0]
        # steps that did not settle leave a slope without its curvature
        usable = (away * (away @ prior)).sum(1) < FARTHEST**2
        precision = torch.where(usable[:, None, None], own.precision, 0.0)
        return own._replace(precision=precision, shift=torch.where(usable[:, None], own.shift, 0.0))

    def _normal(self, size: int, count: int = 1) -> Tensor:
        """Return `count` standard normal vectors for each chain."""
        g = torch.Generator().manual_seed(self.seed & 0x7FFFFFFF)
        return torch.randn(count * self.joint.count, size, generator=g)

    def _ascended(self, standard: Standard, draws_z: Tensor, apart: float = 0.0) -> Tensor:
        """Return the highest points (at most MODES, K + N E), apart, that climbs from many places reach."""
        hierarchy, shared, count = self.joint.hierarchy, self.joint.shared, self.joint.count
        # of vague priors all draws may be impossible
        near = hierarchy.reading.origin.double() + AWAY * self._normal(shared, POINTS)
        places = draws_z, prior_draws(hierarchy, self.seed)[:, :shared], near
        x = torch.zeros(len(places), POINTS * count, self.joint.size)
        x[..., :shared] = torch.stack(
            [self.joint.x_of(thinned(z, POINTS * count), standard) for z in places]
        )
        value = torch.stack([self.joint.at(some, standard)[0] for some in x])
        value = value.nan_to_num(nan=-torch.inf, posinf=-torch.inf)
        if not bool(value.isfinite().any()):
            raise ValueError(f"{NOWHERE_FINITE}{self._fault(draws_z[0])}")
        best = value.topk(-(-count // len(places)), 1).indices
        at = x.gather(1, best[..., None].expand(-1, -1, x.shape[2])).flatten(0, 1)[:count]
        narrowed = partial(self._narrowed, standard=standard, apart=apart)
        climb = Adam(LENGTH)
        state = climb.init(at)
        for _ in range(FIRST):  # which steep places and ridges do not hold
            move, state = climb.update(-narrowed(at)[1].nan_to_num(0.0, 0.0, 0.0), state)
            at = at + move
        at, value = climbed_at_once(narrowed, at, ASCENT, LONGEST)
        chosen = list[Tensor]()
        for x in at[value.argsort(descending=True)]:  # of one mode many would reach the same
            is_apart = all(bool((x - other)[:shared].norm() > DISTANT) for other in chosen)
            if is_apart and len(chosen) < MODES:
                chosen.append(x)
        # at scales of 0.001 the climbs of many end before the mode
        return torch.stack([climbed(narrowed, x) for x in chosen])

    def _mode_at(self, standard: Standard, at: Tensor) -> tuple[Mode, float, float]:
        """Return a mode, the log mass about it by its curvature, as the higher may be narrow, and the rise left."""
        mode = self._normal_about(standard, at)
        value, slope = self._narrowed(at[None], standard)
        mass = (value + mode.volume).nan_to_num(nan=-torch.inf, posinf=-torch.inf)
        return mode, float(mass), mode.gain(slope[0])

    def _fault(self, z: Tensor) -> str:
        """Say which term is not finite at z (K,): a prior, or the likelihood of a client's rows."""
        hierarchy, rows = self.joint.hierarchy, self.joint.rows
        program, none = hierarchy.program, torch.zeros(hierarchy.reading.own_size)
        batch = hierarchy.batch(self.joint.none.fields)
        for name, site in hierarchy.sites(z, none, batch).items():
            if name not in program.labels and name not in program.factors:
                log_p = site["fn"].log_prob(site["value"])
                if not bool(log_p.isfinite().all()):
                    return f"; the prior of site '{name}' is not finite there"
        v = torch.cat([none, z[hierarchy.reading.shared]]).expand(rows.clients, 1, -1)
        bad = int((~rows.values(v).isfinite()).sum())
        sites = ", ".join(f"'{name}'" for name in (*program.labels, *program.factors))
        of_rows = f"; the likelihood {sites} of {bad} of {len(v)} clients is not finite there"
        return of_rows if bad else ""

    def _narrowed(self, x: Tensor, standard: Standard, apart: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return log densities (S,) with narrower e and gradients (S, K + N E), at points x.

        They are means over e moved `apart` sds both ways.
        """
        is_own = torch.arange(x.shape[1]) >= self.joint.shared
        e = torch.where(is_own, x, 0.0)
        if apart:
            move = torch.where(is_own, apart * self._normal(x.shape[1])[0], 0.0)
            ends = [self.joint.at(x + end, standard) for end in (move, -move)]
            value, slope = (0.5 * (above + below) for above, below in zip(*ends, strict=True))
        else:
            value, slope = self.joint.at(x, standard)
        return value - 0.5 * e.square().sum(1), slope - e

    def _slopes(self, standard: Standard, size: int) -> Slopes:
        """Return slopes in the leading coordinates of points (S, size), of which the others are 0."""

        def slopes(x: Tensor) -> Tensor:
            points = torch.nn.functional.pad(x, (0, self.joint.size - size))
            return self.joint.at(points, standard)[1][:, :size]

        return slopes

    def _normal_about(self, standard: Standard, at: Tensor) -> Mode:
        """Return the Normal distribution by the curvature at a mode, with narrower e."""
        return normal_about(at, self._bends(lambda x: self._narrowed(x, standard)[1], at))

    def _bends(self, slopes: Slopes, at: Tensor) -> Bends:
        return bends(slopes, at, self.joint.shared, self.joint.own)

    def _about_scales(self, alone: Standard, mode: Tensor) -> ChainStart | None:
        """Return a start about the mode of the scales alone, the numbers that they scale being integrated.

        Where these are centered the mode of all is that. None where nothing scales numbers, or where they
        are many.
        """
        size, outside = len(mode), self.joint.hierarchy.outside
        if size > SCALED:
            return None
        farthest = torch.full((size,), torch.inf)
        farthest[outside] = FARTHEST_MOVE
        numbers = mode
        normal = normal_about(mode, self._bends(self._slopes(alone, size), mode).of_all())
        for _ in range(MOVES):
            centering = self._centering(alone, numbers, normal.tril.square().sum(1).sqrt())
            if not len(centering.mode):
                return None
            standard = alone._replace(centering=centering)
            at = climbed(partial(self.joint.at, standard=standard), numbers, farthest)
            normal = normal_about(at, self._bends(self._slopes(standard, size), at).of_all())
            is_there = bool(((at - numbers).abs() < farthest).all())
            numbers, farthest = centering.at(at[None])[0][0], SHORTER * farthest
            if is_there:
                break
        return ChainStart(standard, at + self._normal(size) @ normal.tril.mT, normal.leading)

    def _mass_about(self, start: ChainStart) -> float:
        """Return the log of about how much mass there is about a start, of whose points every second one is wide."""
        value = self.joint.at(start.points, start.standard)[0][::2].nan_to_num(nan=-torch.inf)
        return float(value.median() + start.whitening.tril.diagonal().log().sum())

    def _centering(self, standard: Standard, at: Tensor, sd: Tensor) -> Centering:
        """Return how the leading numbers move with scales about a point (L,), where they have an `sd` (L,)."""
        hierarchy, size = self.joint.hierarchy, len(at)
        inside = torch.cat([hierarchy.inside, torch.arange(self.joint.shared, size)])
        prior = self.joint.precisions(at)[inside]
        slopes = self._slopes(standard, size)
        shared, own = self.joint.shared, self.joint.own
        return ScaledPoint(
            slopes, at, sd, prior, inside, hierarchy.outside, shared, own
        ).centering()

    def _spread(self, whitening: Whitening, standard: Standard, at: Tensor) -> Tensor:
        """Return points z about a mode `at` where the density is finite, (S, K)."""
        shared, count = self.joint.shared, self.joint.count
        z = whitening.loc + self._normal(shared, TRIES) @ whitening.tril.mT
        x = at.repeat(len(z), 1)
        x[:, :shared] = z
        value = self.joint.at(x, standard)[0]
        usable = value > value.nan_to_num(nan=-torch.inf).max() - NATS * shared - MORE
        usable[0] |= not bool(usable.any())
        z = z[usable]
        return z[torch.arange(max(count, len(z))) % len(z)]


def _plausible(factor: Factor, growth: Growth) -> tuple[Factor, Growth]:
    """Return factors and growths, without those of clients whose numbers outgrew their digits."""
    numbers = [factor.precision, factor.shift, growth.center, growth.slope, growth.rates]
    largest = torch.stack([v.nan_to_num(nan=torch.inf).abs().flatten(1).amax(1) for v in numbers])
    known = largest.amax(0) < LARGEST

    def kept(v: Tensor) -> Tensor:
        return torch.where(known.view(-1, *[1] * (v.dim() - 1)), v, 0.0)

    moves = {name: kept(v) for name, v in growth._asdict().items() if name != "origin"}
    return Factor(*map(kept, factor)), growth._replace(**moves)


def _are_apart(one: Mode, other: Mode) -> bool:
    """Return whether two modes are far from each other in sds of the wider one."""
    sds = one.leading_back(other.loc[None]), other.leading_back(one.loc[None])
    return bool(torch.cat(sds).norm(dim=1).min() > FAR)
