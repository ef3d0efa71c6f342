"""Chains on the exact posterior of all clients' rows in one process, where rounds do not end.

    p(z) prod_k p(w_k, t_k | z) p(y_k | v_k)

Each client's own scalars are standardized given the global ones z by its Gaussian factor,

    w_k = mean_k(z) + tril_k(z) e_k,    Normal(mean, tril tril') ~ p(w | z) factor_k(v)

so that e_k is standard normal wherever the factor is right: the chains see neither funnels nor
correlations with z. A factor that is wrong costs time only, as the density is that of the rows;
one that is 0 gives the non-centered form. Where many clients have equal rows, a client's only e is
summed over nodes, as many as change nothing, and the chains move z alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.chains import LEAPS, Whitening, leaps_of
from hierfl.core.gaussians import Factor
from hierfl.core.process import double_precision
from hierfl.core.traced import WorkCounter
from hierfl.data.batch import ClientBatch, in_double
from hierfl.methods.stages.checks import misread, points_to_test
from hierfl.methods.stages.joint import (
    LOCATING,
    Joint,
    PlainJoint,
    ScalarNodes,
    Standard,
    flat,
    standard_of,
)
from hierfl.methods.stages.mixing_chains import (
    LEAST,
    MOST,
    WARM,
    ChainCoordinates,
    Said,
    until_mixed,
)
from hierfl.methods.stages.server import Rounds
from hierfl.methods.stages.state import DONE, ServerState
from hierfl.program.handlers import unchecked
from hierfl.summaries.factor import factor_of, q_of
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.moving import line_of
from hierfl.summaries.packed_rows import PackedRows, packed
from hierfl.summaries.reading import QuadratureNodes, gauss_hermite
from hierfl.summaries.sampling import one_thread
from hierfl.summaries.surrogate import any_client
from hierfl.summaries.units import UnitScore
from hierfl.summaries.weights import Points

MOST_SCALARS = 4000  # of all clients together: a whitening matrix of them has to be held
# chains by rows x predictors, and by scalars, of which one is as many; renewals of the factors
# before them, steps to a mode
CHAINS, PER_SCALAR = ((2e4, 64), (2e5, 32), (2e6, 16), (math.inf, 8)), 100
TURNS, CLIMB = 2, 100
GRADIENT = 3  # values that the gradient of one costs
TRIES = 20  # points for each chain, of which it starts at one of the likeliest
NOWHERE_FINITE = (
    "the joint log density is not finite at any draw of the priors, nor near 0: check the scales of "
    "the priors and what the model computes from their draws"
)
STEP, FLATTEST = 1e-4, 0.02  # of differences of slopes; least curvature of a direction
LOWEST = 1e30  # log density of a point where it is not finite
AWAY = 0.5  # sd of points about 0
# nodes of a client's only scalar, tried in turn; sd of what twice as many change, in nats
ORDERS, ERROR = (7, 15, 31, 63), 0.05
WIDE = 3.0  # sds about the mode from which every second chain starts: R-hat then sees another mode
FARTHEST = 5.0  # sds of the belief that a client's factor may move its scalars
FEW = 4  # draws of z by which clients locate their mixing variables, for each number of z


class Ended(NamedTuple):
    """Draws of the exact posterior."""

    draws: Tensor  # (S, K + N M), as the server keeps them
    r_hat: float
    effective: float  # the least effective number of one of the scalars


class Chains:
    """Chains on the exact posterior of a program, by all clients' rows in one process."""

    def __init__(self, rounds: Rounds, score: UnitScore, batch: ClientBatch, seed: int) -> None:
        """Read the rows of `batch`, whose clients are in the order of their names."""
        self.surrogate, self.seed = rounds.work.surrogate, seed
        hierarchy = self.surrogate.hierarchy
        with double_precision(), torch.no_grad(), unchecked():
            doubled, tested = in_double(batch), points_to_test(score.reading)
            self.whole: PackedRows = packed(score, batch, distinct=True)
            while bool(misread(self.whole, doubled, tested).any()) and score.relies_less():
                self.whole = packed(score, batch, distinct=True)
            self.nodes: QuadratureNodes = score.nodes
        self.of_all = {n: doubled.client_fields[n][:, 0] for n in hierarchy.fields}
        alone = hierarchy.normal_size == 1 and hierarchy.mixing is None
        self._sum_over(ORDERS[0] if alone else 0)
        # of few equal clients chains of all scalars are faster
        costs = len(self.rows.client) * (GRADIENT * ORDERS[0] + LOCATING) / GRADIENT
        if alone and costs > len(self.whole.client):
            self._sum_over(0)

    def _sum_over(self, order: int) -> None:
        """Sum over so many nodes of each client's scalar, clients of equal rows once; 0: over none."""
        places = torch.arange(self.whole.clients)
        with double_precision(), torch.no_grad(), unchecked():
            some, self.client = self.whole.units.equal_clients() if order else (places, places)
            self.rows = self.whole.some(some)
            self.fields = {n: v[some] for n, v in self.of_all.items()}
            rows = len(self.rows.client) * max(1, self.rows.design.shape[1])
            work = rows * (GRADIENT * order + LOCATING) if order else rows + PER_SCALAR * self.size
            self.count = next(many for most, many in CHAINS if work <= most)
            self.joint = self._joint(order)

    def _joint(self, order: int) -> Joint:
        times = torch.bincount(self.client).double()
        nodes = ScalarNodes(*gauss_hermite(order, torch.float64), times) if order else None
        return Joint(self.surrogate, self.rows, self._none(), self.count, nodes)

    @property
    def size(self) -> int:
        """How many scalars there are, of z and of the clients that are computed."""
        hierarchy = self.surrogate.hierarchy
        own = hierarchy.normal_size + hierarchy.mixing_size
        return len(hierarchy.reading.origin) + self.rows.clients * own

    @cached_property
    def seconds(self) -> float:
        """The counted work of chains, by which they are compared with rounds; infinite if too large."""
        if self.size > MOST_SCALARS:
            return math.inf
        with double_precision(), one_thread(), torch.no_grad(), unchecked():
            origin = self.surrogate.hierarchy.reading.origin.double()
            x = torch.cat([origin, torch.zeros(self.joint.size - len(origin))])
            once = self.joint.gradient.seconds(
                x.expand(self.count, -1).contiguous(), *flat(self._alone(origin[None]))
            )
        return once * LEAPS * (WARM + 2 * LEAST)

    @cached_property
    def factor_seconds(self) -> float:
        """The counted work of one step of all clients' factors."""
        size, count = self.surrogate.hierarchy.reading.size, self.whole.clients
        eye = torch.eye(size, dtype=torch.float64).expand(count, -1, -1)
        with double_precision(), one_thread(), unchecked(), WorkCounter() as counter:
            self.whole.expected(eye[:, 0] * 0.0, eye, self.nodes)
        return counter.seconds(recorded=False)

    @property
    def expected(self) -> tuple[float, float]:
        """About how many seconds the chains take: if they mix at once, and if they run on to the end."""
        usual = self.seconds * leaps_of(self.joint.size) / LEAPS
        return usual, usual * (WARM + 2 * MOST) / (WARM + 2 * LEAST)

    def run(self, state: ServerState, count: int, said: Said = lambda usual, most: None) -> Ended:
        """Return draws, from what a server's state says of the posterior."""
        with double_precision(), one_thread(), torch.no_grad(), unchecked():
            standard, start, whitening = self._with_enough_nodes(state.scouts)
            how = (standard, self.seed, count, said)
            joint = self._plain()
            plain = None if joint is None else ChainCoordinates(joint, *how, jumps=False)
            first = ChainCoordinates(self.joint, *how)
            where, drawn = until_mixed(first, plain, start, whitening)
            t = where.joint.mixing(drawn.draws, standard)
            draws = torch.cat([drawn.draws[:, : self.joint.shared], t], 1)
        return Ended(draws, drawn.r_hat, min(drawn.effective, float(count)))

    def _plain(self) -> PlainJoint | None:
        """Return the program's own coordinates; None where they are worse, or cost as much."""
        hierarchy = self.surrogate.hierarchy
        # a centered program's Normal sites are a funnel, in which chains look mixed that are not
        if hierarchy.mixing is None:
            is_worse = hierarchy.reading.effects is None
        else:
            is_worse = bool(hierarchy.mixing.scattered)
        if is_worse or self.joint.nodes is not None:
            return None
        return PlainJoint(self.surrogate, self.rows, self._none(), self.count)

    def _with_enough_nodes(self, scouts: Points) -> tuple[Standard, Tensor, Whitening]:
        """Return what `_located` does, with as many nodes as change nothing there; or without."""
        located = self._located(scouts)
        z = located[1][::2, : self.joint.shared]
        joints = [] if self.joint.nodes is None else [self.joint, *map(self._joint, ORDERS[1:])]
        for joint, finer in pairwise(joints):
            change = finer.values(z, located[0]) - joint.values(z, located[0])
            if float(change.std()) < ERROR:
                self.joint = joint
                return located
        if joints:  # even the most change something
            self._sum_over(0)
            located = self._located(scouts)
        return located

    def _located(self, scouts: Points) -> tuple[Standard, Tensor, Whitening]:
        """Return clients' scales by factors about the mode, where the chains start, and their whitening."""
        z = scouts.resampled(len(scouts.draws))
        shared = self.joint.shared
        standard = self._alone(z[:, :shared])
        at = self._likeliest(standard, z[:, :shared])
        for _ in range(TURNS):  # each by factors about the mode of the one before
            mode = self._climbed(standard, at)[:shared]
            of_z = self._whitening(standard, mode)
            near = self._spread(of_z, standard)
            standard, at = self._about(near), torch.zeros(self.joint.size)
            at[:shared] = mode
        own = self.joint.size - shared
        wide = self._spread(of_z._replace(tril=WIDE * of_z.tril), standard)
        z = near[: self.count].clone()
        z[1::2] = wide[1 : self.count : 2]
        start = torch.cat([z, self._normal(self.count, own)], 1)
        return standard, start, of_z._replace(loc=at, scale=torch.ones(own))

    def _none(self) -> Factors:
        size, count = self.surrogate.hierarchy.reading.size, self.rows.clients
        return Factors(torch.zeros(count, size, size), torch.zeros(count, size), self.fields)

    def _alone(self, z: Tensor) -> Standard:
        """Return scales by the prior alone, about draws of z (S, K)."""
        none = self._none()
        return self._standard(none.precision, none.shift, z)

    def _standard(self, precision: Tensor, shift: Tensor, z: Tensor) -> Standard:
        few, hierarchy = z[:: max(1, len(z) // (FEW * (1 + z.shape[1])))], self.surrogate.hierarchy
        line = line_of(hierarchy, few, self.fields, (precision, shift))
        return standard_of(precision, shift, line, hierarchy.reading.own_size)

    def _about(self, z: Tensor) -> Standard:
        """Return clients' scales by their factors about draws of z (S, K)."""
        none = self._none()
        equal = torch.full((len(z),), -math.log(len(z)))
        belief = any_client(self.surrogate, z, equal, none)
        count = self.rows.clients
        before = Factor(none.precision, none.shift, torch.zeros(count))
        unknown = torch.zeros(count, dtype=torch.bool)
        own = factor_of(self.rows, belief, self.nodes, before, unknown)
        prior = torch.linalg.inv_ex(belief[1]).inverse
        away = q_of((belief[0], prior), own)[0] - belief[0]
        # steps that did not settle leave a slope without its curvature
        usable = (away * (away @ prior)).sum(1) < FARTHEST**2
        precision = torch.where(usable[:, None, None], own.precision, 0.0)
        shift = torch.where(usable[:, None], own.shift, 0.0)
        return self._standard(precision, shift, z)

    def _normal(self, count: int, size: int) -> Tensor:
        g = torch.Generator().manual_seed(self.seed & 0x7FFFFFFF)
        return torch.randn(count, size, generator=g)

    def _likeliest(self, standard: Standard, z: Tensor) -> Tensor:
        """Return the point of the highest density, of draws z (S, K) and of points about 0, at e = 0."""
        some = z[:: max(1, len(z) // (TRIES * self.count))]
        # of vague priors all draws may be impossible
        near = AWAY * self._normal(TRIES * self.count, self.joint.shared)
        some = torch.cat([some, self.surrogate.hierarchy.reading.origin.double() + near])
        x = torch.zeros(len(some), self.joint.size)
        x[:, : self.joint.shared] = some
        value = self.joint.at(x, standard)[0]
        best = value.nan_to_num(nan=-torch.inf, posinf=-torch.inf).argmax()
        if not bool(value[best].isfinite()):
            raise ValueError(f"{NOWHERE_FINITE}{self._fault(x[0, : self.joint.shared])}")
        return x[best]

    def _fault(self, z: Tensor) -> str:
        """Say which term is not finite at z (K,): a prior, or the likelihood of a client's rows."""
        hierarchy, program = self.surrogate.hierarchy, self.surrogate.hierarchy.program
        none = torch.zeros(hierarchy.reading.own_size)
        for name, site in hierarchy.sites(z, none, hierarchy.batch(self.fields)).items():
            if name not in program.labels and name not in program.factors:
                log_p = site["fn"].log_prob(site["value"])
                if not bool(log_p.isfinite().all()):
                    return f"; the prior of site '{name}' is not finite there"
        v = torch.cat([none, z[hierarchy.reading.shared]]).expand(self.rows.clients, 1, -1)
        bad = int((~self.rows.values(v).isfinite()).sum())
        sites = ", ".join(f"'{name}'" for name in (*program.labels, *program.factors))
        of_rows = f"; the likelihood {sites} of {bad} of {len(v)} clients is not finite there"
        return of_rows if bad else ""

    def _climbed(self, standard: Standard, start: Tensor) -> Tensor:
        """Return the mode of the density, with narrower e, from a point (K + N E,).

        Where one row can sit at infinite density, as of a client with a scale of its own, the mode
        is there: no draw is.
        """
        at = start.clone().requires_grad_()
        climb = torch.optim.LBFGS([at], max_iter=CLIMB, line_search_fn="strong_wolfe")
        is_own = (torch.arange(len(start)) >= self.joint.shared).to(start)

        def narrowed(x: Tensor) -> tuple[Tensor, Tensor]:
            value, slope = self.joint.at(x[None], standard)
            e = is_own * x
            return value[0] - 0.5 * e.square().sum(), slope[0] - e

        def loss() -> Tensor:
            value, slope = narrowed(at.detach())
            at.grad = -slope.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            return -value.nan_to_num(nan=-LOWEST, posinf=-LOWEST, neginf=-LOWEST)

        climb.step(loss)
        there = at.detach()
        rises = bool(narrowed(there)[0] >= narrowed(start)[0])
        return there if rises and bool(there.isfinite().all()) else start

    def _whitening(self, standard: Standard, mode: Tensor) -> Whitening:
        """Return the Normal distribution of z by the curvature at its mode, by differences of slopes."""
        size, eye = len(mode), torch.eye(len(mode))
        x = torch.zeros(2 * size, self.joint.size)
        x[:, :size] = mode + STEP * torch.cat([eye, -eye])
        slopes = self.joint.at(x, standard)[1][:, :size]
        ahead, behind = slopes.split(size)
        curvature = (behind - ahead) / (2.0 * STEP)
        values, vectors = torch.linalg.eigh(0.5 * (curvature + curvature.mT).nan_to_num())
        covariance = (vectors / values.abs().clamp(min=FLATTEST)) @ vectors.mT
        return Whitening(mode, torch.linalg.cholesky_ex(covariance).L, torch.ones(0))

    def _spread(self, whitening: Whitening, standard: Standard) -> Tensor:
        """Return points about a mode where the density is finite, (S, K)."""
        z = whitening.loc + self._normal(TRIES * self.count, self.joint.shared) @ whitening.tril.mT
        x = torch.zeros(len(z), self.joint.size)
        x[:, : self.joint.shared] = z
        value = self.joint.at(x, standard)[0]
        usable = value > value.nan_to_num(nan=-torch.inf).max() - 5.0 * self.joint.shared - 10.0
        usable[0] |= not bool(usable.any())
        z = z[usable]
        return z[torch.arange(max(self.count, len(z))) % len(z)]


def chained(rounds: Rounds, state: ServerState, ended: Ended) -> ServerState:
    """Return a server's state with draws of the exact posterior, which asks for factors about them."""
    count, yes = len(ended.draws), torch.tensor(True)
    with double_precision(), torch.no_grad(), unchecked():
        scouts = Points.equal(ended.draws[:: max(1, count // len(state.scouts.draws))])
        belief, final = rounds.work.of_any_client(scouts, state.factors), Points.equal(ended.draws)
    return replace(
        state.gathering(),
        belief=belief,
        chained=yes,
        sampled=yes,
        proposed=yes,
        final=final,
        scouts=scouts,
        powers=torch.ones_like(state.powers),
        share=torch.tensor(ended.effective / count),
        r_hat=torch.tensor(ended.r_hat),
        k_hat=torch.tensor(0.0),
        effective=torch.tensor(ended.effective),
        inner_error=torch.tensor(torch.nan),
    )


def closed(state: ServerState) -> ServerState:
    """Return the state of chains as done, where clients cannot weight their draws."""
    return replace(state.at(DONE), weighted=torch.ones_like(state.weighted))
