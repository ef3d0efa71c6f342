"""How clients' marginal likelihoods differ from those of their factors, at given global sites.

    log p(y_k | z) = log integral p(w | z) factor_k(v) dw + log E[ p(y_k | v) / factor_k(v) ]

The server knows the first term. The expectation is over p(w | z) factor_k(v), normalized, by standard
normal points. Of quasi-random ones there are several sets, by turns at each z, and each client has a
rotation: an error that is one function of z at all draws is a bias (one set, though rotated, keeps its
radii, which moved means by 0.1 sd and a noise scale by 0.2); one that differs between neighbors is
noise of the weights, which leaves expectations where they are.
"""

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.gaussians import product
from hierfl.core.importance_sampling import heavy_points, normal_points
from hierfl.program.sites import Values
from hierfl.summaries.conditional import Proposal, normals_of, point, proposals_at, sides_of
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.packed_rows import PackedRows
from hierfl.summaries.quartic import Quartic
from hierfl.summaries.reading import gauss_hermite

NODES = {1: 10, 2: 6}  # fewest Gauss-Hermite nodes a dimension, by the number of local unknowns
POINTS = 32  # quasi-random points where there are more
TIMES = (1, 4, 16)  # as many times as many points are tried
# degrees of freedom of a Student t's points, as a factor may miss tails; and the most dimensions in
# which so few of them do
FREEDOM, MOST_HEAVY = 4.0, 6
MIXED = 128  # points where some are mixing variables
TURNS = 61  # sets of quasi-random points, by turns: prime, since draws may have a period
ENOUGH = 4  # points a dimension for their covariance to be made the identity
# draws at which few points are compared with many; sd of the error of all clients, in nats: of the
# nodes of a sum, whose errors add up, and of sampled points, where it is noise
TRIED, ERROR, NOISE = 32, 0.15, 0.25
OUTER = 0.05  # share of the draws at either end, whose errors do not count
CONDITIONALS = 1 << 21  # draws x clients x (D + 1)^2 scalars carried at once


class Ratios(NamedTuple):
    """C clients' marginal likelihoods over those of their factors, at S draws.

    The error, by the difference of two halves of the points, is too large rather than too small.
    """

    log: Tensor  # (C, S) log E[ p(y_k | v) / factor_k(v) ]
    error: Tensor  # (C, S); 0 of a sum's nodes


def is_sampled(hierarchy: Hierarchy) -> bool:
    """Return whether the points are quasi-random, and not the nodes of a sum."""
    size = hierarchy.normal_size
    return bool(hierarchy.mixing_size) or (size > 0 and size not in NODES)


def ratios_of(
    hierarchy: Hierarchy,
    rows: PackedRows | Quartic,
    factor: tuple[Tensor, Tensor],
    draws: Tensor,
    *,
    fields: Values,
    keys: Tensor,
    proposals: Proposal | None = None,
    rough: bool = False,
) -> Ratios:
    """Return C clients' ratios at z (S, K); `keys` are (C, 2), `proposals` (C, 2, M, ...).

    `rough` ones are as exact each as those of all clients are together otherwise.
    """
    own = None
    if is_sampled(hierarchy):  # or all clients err in one direction
        own = _own(hierarchy, noise.fold(keys, noise.word("two_stage.weigh")))
    together = 1 if rough else hierarchy.program.num_clients
    whole = _Clients(hierarchy, rows, factor, fields, proposals, own, together)
    ratios = [whole.some(who).ratios(draws) for who in rows.blocks()]
    return Ratios(*(torch.cat(tensors) for tensors in zip(*ratios, strict=True)))


def central_variance(error: Tensor) -> Tensor:
    """Return the variances (C,) of errors at S draws (C, S), which draws far out do not inflate.

    An error that is the same at all draws does no harm, nor does that of the few whose own weight is
    nothing: where it is a large weight, k-hat shows it.
    """
    ordered = error.sort(1).values
    cut = int(OUTER * error.shape[1])
    return error.clamp(ordered[:, cut, None], ordered[:, -1 - cut, None]).var(1)


class PointSets(NamedTuple):
    """T sets of standard normal points of local scalars, M + Dn, and their log weights."""

    at: Tensor  # (T, P, M + Dn)
    log_weights: Tensor  # (T, P)


def standard_points(hierarchy: Hierarchy, times: int = 1) -> PointSets:
    """Return the sets of points: one of a sum's nodes, or quasi-random ones."""
    size, mixing = hierarchy.normal_size, hierarchy.mixing_size
    if mixing:
        return _sets(MIXED, mixing + size)
    if size in NODES:
        count = round(NODES[size] * times**0.5)
        nodes, weights = gauss_hermite(count, torch.get_default_dtype())
        grid = torch.cartesian_prod(*[nodes] * size).view(1, -1, size)
        return PointSets(
            grid, torch.cartesian_prod(*[weights.log()] * size).view(1, -1, size).sum(2)
        )
    if not size:
        return PointSets(torch.zeros(1, 1, 0), torch.zeros(1, 1))
    return _sets(times * max(POINTS, 2 * size), size, is_heavy=size <= MOST_HEAVY)


@cache
def _sets(count: int, size: int, *, is_heavy: bool = False) -> PointSets:
    """Return sets of quasi-random points: of Student t's, or Normal ones of exact covariances.

    The latter have too small a fourth moment, the less so the more dimensions there are.
    """
    if is_heavy:
        sets = [_heavy(count, size, seed) for seed in range(TURNS)]
        return PointSets(*(torch.stack(tensors) for tensors in zip(*sets, strict=True)))
    points = torch.stack([normal_points(count, size, seed=seed) for seed in range(TURNS)])
    log_weights = torch.full((TURNS, count), -math.log(count))
    if count < ENOUGH * size:  # of so few, variances alone
        return PointSets(points / points.square().mean(1, keepdim=True).sqrt(), log_weights)
    tril = torch.linalg.cholesky(points.mT @ points / count)
    whole = torch.linalg.solve_triangular(tril, points.mT, upper=False).mT
    return PointSets(whole, log_weights)


def _heavy(count: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points of a Student t, (P, D), and the log ratios of a Normal's density to its, (P,)."""
    normal, stretch = heavy_points(count, size, freedom=FREEDOM, seed=seed)
    points = normal * stretch
    square = points.square().sum(1)
    heavy = -0.5 * (FREEDOM + size) * torch.log1p(square / FREEDOM)
    return points, (-0.5 * square - heavy).log_softmax(0)


class _Own(NamedTuple):
    """How C clients differ in their quasi-random points."""

    rotation: Tensor  # (C, M + Dn, M + Dn)
    first: Tensor  # (C,) int64, the set at the first draw


def _own(hierarchy: Hierarchy, keys: Tensor) -> _Own:
    """Return how clients differ, at random by keys (C, 2)."""
    size = hierarchy.mixing_size + hierarchy.normal_size
    normals = noise.normals(keys, (size, size)).double()
    first = noise.uniforms(keys, ()) * TURNS
    return _Own(torch.linalg.qr(normals)[0], first.long())


@dataclass(frozen=True, eq=False)
class _Clients:
    """Clients, and where their local scalars lie given z."""

    hierarchy: Hierarchy
    rows: PackedRows | Quartic
    factor: tuple[Tensor, Tensor]
    fields: Values
    proposals: Proposal | None
    own: _Own | None  # None: a sum's nodes
    together: int  # clients whose errors add up

    def some(self, who: Tensor) -> "_Clients":
        """Return the clients at some positions."""
        if len(who) == self.rows.clients:
            return self
        proposals = self.proposals and Proposal(*(v[who] for v in self.proposals))
        fields = {name: v[who] for name, v in self.fields.items()}
        factor = self.factor[0][who], self.factor[1][who]
        rows = self.rows.some(who)
        own = self.own and _Own(*(v[who] for v in self.own))
        return _Clients(self.hierarchy, rows, factor, fields, proposals, own, self.together)

    def ratios(self, draws: Tensor) -> Ratios:
        """Return the ratios at draws (S, K), by as many points as each client needs."""
        points = standard_points(self.hierarchy)
        if self.proposals is not None or not self.hierarchy.normal_size:
            return self._at(draws, points)
        count, tolerance = TRIED, NOISE / math.sqrt(self.together)
        if not is_sampled(self.hierarchy):
            count, tolerance = max(2, min(TRIED, len(draws) // TRIED)), ERROR / self.together
        some = draws[:: max(1, len(draws) // count)]
        # the first points that agree with more; the last ones where none do
        who = torch.arange(self.rows.clients)
        needed = torch.zeros_like(who)
        log = self._at(some, points).log
        for times in TIMES[1:]:
            finer = self.some(who)._at(some, standard_points(self.hierarchy, times)).log
            rough = (finer - log).std(1) >= tolerance
            who, log = who[rough], finer[rough]
            needed[who] += 1
            if not len(who):
                break
        log, error = torch.zeros(2, self.rows.clients, len(draws))
        for i in needed.unique().tolist():
            who = (needed == i).nonzero()[:, 0]
            points = standard_points(self.hierarchy, TIMES[i])
            log[who], error[who] = self.some(who)._at(draws, points)
        return Ratios(log, error)

    def _at(self, draws: Tensor, points: PointSets) -> Ratios:
        """Return the ratios at draws (S, K), by sets of points."""
        count, size = points.at.shape[1:]
        at_once = CONDITIONALS // (self.rows.clients * (size + 1) ** 2)
        of = self._normal
        if self.proposals is not None:
            at_once, of = at_once // count, self._mixed
        every = torch.arange(len(draws))
        ratios = [of(draws[s], points, s) for s in every.split(max(1, at_once))]
        return Ratios(*(torch.cat(tensors, 1) for tensors in zip(*ratios, strict=True)))

    def _turned(self, points: PointSets, s: Tensor) -> PointSets:
        """Return each client's rotated points at draws s, (C, S, P, M + Dn); nodes as they are."""
        if self.own is None:
            return points
        sets = (self.own.first[:, None] + s) % TURNS
        return PointSets(
            product(points.at[sets], self.own.rotation[:, None]), points.log_weights[sets]
        )

    def _normal(self, draws: Tensor, points: PointSets, every: Tensor) -> Ratios:
        mean, tril = normals_of(self.hierarchy, self.fields, self.factor, draws)
        count, ratios = points.at.shape[1], []
        for s in torch.arange(len(draws)).split(self.rows.draws_at_once(count)):
            at, log_weights = self._turned(points, every[s])
            w = mean[:, s, None] + product(at, tril[:, s].mT)  # (C, s, P, D)
            ratios.append(_summed(self.log_ratio(draws[s], w), log_weights, self.halves(count)))
        return Ratios(*(torch.cat(tensors, 1) for tensors in zip(*ratios, strict=True)))

    def _mixed(self, draws: Tensor, points: PointSets, every: Tensor) -> Ratios:
        """Return the ratios where clients have mixing variables: each point has its own weight."""
        h, count = self.hierarchy, points.at.shape[1]
        sides, row = sides_of(count, h), h.batch(self.fields, self.rows.clients)

        def at(z: Tensor, e: Tensor) -> Any:
            assert self.proposals is not None
            proposals = proposals_at(h, z, row, self.factor, self.proposals)
            at_side = partial(point, h, z, row, self.factor, proposals)
            return torch.vmap(at_side)(e, sides)

        e, log_weights = self._turned(points, every)
        w, weight = torch.vmap(at)(draws, e.permute(1, 2, 0, 3))  # (S, P, C, D) and (S, P, C)
        log_weights = log_weights + weight.movedim(2, 0)
        log_ratio = self.log_ratio(draws, w.movedim(2, 0))
        return _summed(log_ratio, log_weights, self.halves(count))

    def log_ratio(self, draws: Tensor, w: Tensor) -> Tensor:
        """Return log p(y | v) - log factor(v), (C, S, P), at w (C, S, P, D) and draws (S, K)."""
        u = draws[:, self.hierarchy.reading.shared]
        v = torch.cat([w, u[None, :, None].expand(*w.shape[:3], -1)], -1).flatten(1, 2)
        log_factor = ((self.factor[1][:, None] - 0.5 * product(v, self.factor[0])) * v).sum(-1)
        return (self.rows.values(v) - log_factor).view(w.shape[:3])

    def halves(self, count: int) -> tuple[Tensor, Tensor] | None:
        """Return two halves of so many points, each with all reflections; None of a sum's nodes."""
        if count == 1 or not is_sampled(self.hierarchy):
            return None
        half = count // 2  # of a sequence: any other half of it leaves boxes empty
        second = torch.arange(count) % half >= half // 2
        return (~second).nonzero()[:, 0], second.nonzero()[:, 0]


def _summed(log_ratio: Tensor, log_weights: Tensor, halves: tuple[Tensor, Tensor] | None) -> Ratios:
    """Return the ratios, of log ratios (C, S, P) at points with log weights (..., P)."""
    log_terms = log_ratio + log_weights
    whole = log_terms.logsumexp(-1) - log_weights.logsumexp(-1)
    if halves is None:
        return Ratios(whole, torch.zeros_like(whole))
    half, other = (
        log_terms[..., h].logsumexp(-1) - log_weights[..., h].logsumexp(-1) for h in halves
    )
    return Ratios(whole, 0.5 * (half - other))
