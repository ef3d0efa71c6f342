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

from hierfl.core.chains import LEAPS, Sampled, leaps_of
from hierfl.core.process import double_precision
from hierfl.core.traced import WorkCounter
from hierfl.data.batch import ClientBatch, in_double
from hierfl.methods.stages.centering import uncentered
from hierfl.methods.stages.chain_starts import ChainStart, ChainStarts
from hierfl.methods.stages.checks import misread, points_to_test
from hierfl.methods.stages.joint import LOCATING, Joint, PlainJoint, ScalarNodes, Standard, flat
from hierfl.methods.stages.mixing_chains import (
    LEAST,
    MOST,
    WARM,
    ChainCoordinates,
    NewCoordinates,
    Said,
    moved,
    until_mixed,
)
from hierfl.methods.stages.server import Rounds
from hierfl.methods.stages.state import DONE, ServerState
from hierfl.program.handlers import unchecked
from hierfl.summaries.exact import Spread, SummedRows, sums_of
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.packed_rows import PackedRows, packed
from hierfl.summaries.reading import QuadratureNodes, gauss_hermite
from hierfl.summaries.sampling import one_thread
from hierfl.summaries.units import UnitScore
from hierfl.summaries.weights import Points, asked_of

MOST_SCALARS = 4000  # of all clients together: a whitening matrix of them has to be held
# chains by rows x predictors, and by scalars, of which one is as many
CHAINS, PER_SCALAR = ((2e4, 64), (2e5, 32), (2e6, 16), (math.inf, 8)), 100
HEAVY = 32  # at most, where the scalars of a gradient take longer than its operations
FEW = 2  # points at which that is counted
GRADIENT = 3  # values that the gradient of one costs
# nodes of a client's only scalar, tried in turn; sd of what twice as many change, in nats
ORDERS, ERROR = (7, 15, 31, 63), 0.05


class Ended(NamedTuple):
    """Draws of the exact posterior."""

    draws: Tensor  # (S, K + N M), as the server keeps them
    r_hat: float
    effective: float  # the least effective number of one of the scalars


class Chains:
    """Chains on the exact posterior of a program, by all clients' rows in one process."""

    def __init__(
        self,
        rounds: Rounds,
        score: UnitScore,
        spread: Spread | None,
        batch: ClientBatch,
        seed: int,
    ) -> None:
        """Read the rows of `batch`, whose clients are in the order of their names.

        With a `spread` rows are Gaussian, and clients' sums stand for them.
        """
        self.surrogate, self.seed = rounds.work.surrogate, seed
        hierarchy = self.surrogate.hierarchy
        with double_precision(), torch.no_grad(), unchecked():
            doubled, tested = in_double(batch), points_to_test(score.reading)
            self.whole: PackedRows = packed(score, batch, distinct=True)
            while bool(misread(self.whole, doubled, tested).any()) and score.relies_less():
                self.whole = packed(score, batch, distinct=True)
            if spread is not None and hierarchy.mixing is not None:
                self.whole = SummedRows(score, spread, sums_of(self.whole, spread))
            self.nodes: QuadratureNodes = score.nodes
        self.most = CHAINS[0][1]
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
            self.count = min(self.most, next(many for most, many in CHAINS if work <= most))
            self.joint = self._joint(order)

    def _joint(self, order: int) -> Joint:
        times = torch.bincount(self.client).double()
        nodes = ScalarNodes(*gauss_hermite(order, torch.float64), times) if order else None
        size, clients = self.surrogate.hierarchy.reading.size, self.rows.clients
        none = Factors(torch.zeros(clients, size, size), torch.zeros(clients, size), self.fields)
        return Joint(self.surrogate, self.rows, none, self.count, nodes)

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
            standard = self._starts.alone(origin[None])
            x = torch.cat([origin, torch.zeros(self.joint.size - len(origin))])
            self._fewer_if_heavy(x.expand(FEW, -1), standard)
            x = x.expand(self.count, -1).contiguous()
            once = self.joint.gradient.seconds(x, *flat(standard))
        return once * LEAPS * (WARM + 2 * LEAST)

    def _fewer_if_heavy(self, x: Tensor, standard: Standard) -> None:
        """Take fewer chains where many points at once cost as much as one after the other."""
        if self.count <= HEAVY:
            return
        with WorkCounter() as counter:
            self.joint.values(x, standard)
        if counter.is_of_scalars(self.count / len(x)):
            self.most = self.count = HEAVY
            nodes = self.joint.nodes
            self.joint = self._joint(0 if nodes is None else len(nodes.at))

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
            start = self._with_enough_nodes(state.scouts)
            how = self.joint, start.standard, self.seed, count, said
            first = ChainCoordinates(*how, modes=start.modes)
            others = (self._plain, self._renewed)
            where, drawn = until_mixed(first, others, start.points, start.whitening)
            z = where.joint.z_of(drawn.draws, where.standard)
            draws = torch.cat([z, where.joint.mixing(drawn.draws, where.standard)], 1)
            missed = bool(start.modes) and start.misses(self.joint.x_of(z, start.standard))
        r_hat = math.inf if missed else drawn.r_hat
        return Ended(draws, r_hat, min(drawn.effective, float(count)))

    def has_modes(self, state: ServerState) -> bool:
        """Return whether climbs from many places reach several modes of about as much mass."""
        with double_precision(), one_thread(), torch.no_grad(), unchecked():
            z, starts = self._draws_of(state.scouts), self._starts
            return len(starts.modes(starts.alone(z), z)) > 1

    def _draws_of(self, scouts: Points) -> Tensor:
        return scouts.resampled(len(scouts.draws))[:, : self.joint.shared]

    def _renewed(self, here: ChainCoordinates, drawn: Sampled) -> NewCoordinates | None:
        """Return coordinates by factors about draws; None where they are no better."""
        if here.joint is not self.joint:
            return None
        start = self._starts.about_draws(drawn.draws, here.standard)
        if start is None:
            return None
        back = start.standard.centering.back
        modes = here.modes
        if modes:
            z = back(torch.stack([of.loc[: self.joint.shared] for of in modes]))
            modes = self._starts.modes_at(z, start.standard)
        here = replace(here, standard=start.standard, modes=modes)
        return here, start.points, start.whitening

    def _plain(self, here: ChainCoordinates, drawn: Sampled) -> NewCoordinates | None:
        """Return the program's own coordinates; None where they are worse, or cost as much."""
        hierarchy = self.surrogate.hierarchy
        # a centered program's Normal sites are a funnel, in which chains look mixed that are not
        if hierarchy.mixing is None:
            is_worse = hierarchy.reading.effects is None
        else:
            is_worse = bool(hierarchy.mixing.scattered)
        if is_worse or self.joint.nodes is not None:
            return None
        joint = PlainJoint(self.surrogate, self.rows, self.joint.none, self.count)
        as_written = here.standard._replace(centering=uncentered())
        plain = replace(here, joint=joint, standard=as_written, jumps=False)
        return plain, *moved(here, drawn, plain)

    @property
    def _starts(self) -> ChainStarts:
        return ChainStarts(self.joint, self.nodes, self.seed)

    def _with_enough_nodes(self, scouts: Points) -> ChainStart:
        """Return a start by as many nodes as change nothing there; or without."""
        z = self._draws_of(scouts)
        start = self._starts.heaviest(z)
        some = start.points[::2, : self.joint.shared]
        joints = [] if self.joint.nodes is None else [self.joint, *map(self._joint, ORDERS[1:])]
        for joint, finer in pairwise(joints):
            change = finer.values(some, start.standard) - joint.values(some, start.standard)
            if float(change.std()) < ERROR:
                self.joint = joint
                return start
        if joints:  # even the most change something
            self._sum_over(0)
            start = self._starts.heaviest(z)
        return start


def chained(rounds: Rounds, state: ServerState, ended: Ended) -> ServerState:
    """Return a server's state with draws of the exact posterior, which asks for factors about them."""
    count, yes = len(ended.draws), torch.tensor(True)
    # these draws have equal weights, whatever clients say of them
    asked = state.asked[: asked_of(rounds.work.shared, len(state.asked))]
    with double_precision(), torch.no_grad(), unchecked():
        scouts = Points.equal(ended.draws[:: max(1, count // len(state.scouts.draws))])
        belief, final = rounds.work.of_any_client(scouts, state.factors), Points.equal(ended.draws)
    return replace(
        state.gathering(),
        belief=belief,
        chained=yes,
        asked=asked,
        each=state.each[: len(asked)],
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
