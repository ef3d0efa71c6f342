"""How clients' marginal likelihoods differ from those of their factors, at given global sites.

    log p(y_k | z) = log integral p(w | z) factor_k(v) dw + log E[ p(y_k | v) / factor_k(v) ]

The server knows the first term. The expectation is over p(w | z) factor_k(v), normalized, by standard
normal points. Quasi-random ones are rotated at each z: an error that is one function of z at all
draws is a bias (it moved a mean by 0.1 sd where 29 clients have ten dimensions); one that differs
between neighbors is noise of the weights, which leaves expectations where they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.gaussians import product
from hierfl.core.importance_sampling import heavy_points, normal_points
from hierfl.program.sites import Values
from hierfl.summaries.conditional import Proposal, normals_of, point, sides_of
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.packed_rows import PackedRows
from hierfl.summaries.quartic import Quartic
from hierfl.summaries.reading import gauss_hermite

NODES = {1: 10, 2: 6}  # fewest Gauss-Hermite nodes a dimension, by the number of local unknowns
POINTS = 32  # quasi-random points where there are more
TIMES = (1, 4, 16)  # as many times as many points are tried
# degrees of freedom of the Student t whose points are the last to be tried: a factor may miss
# tails; and the most dimensions in which so few of them do
FREEDOM, MOST_HEAVY = 4.0, 6
MIXED = 128  # points where some are mixing variables
TURNS = 61  # rotations, by turns: prime, since draws may have a period
ENOUGH = 4  # points a dimension for their covariance to be made the identity
# draws at which few points are compared with many; sd of the error of all clients, in nats
TRIED, ERROR = 32, 0.15
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
) -> Ratios:
    """Return C clients' ratios at z (S, K); `keys` are (C, 2), `proposals` (C, 2, M, ...)."""
    own = None
    if is_sampled(hierarchy):  # or all clients err in one direction
        size = hierarchy.mixing_size + hierarchy.normal_size
        own = _rotations(noise.fold(keys, noise.word("two_stage.weigh")), size)
    whole = _Clients(hierarchy, rows, factor, fields, proposals, own)
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


def standard_points(hierarchy: Hierarchy, times: int = 1) -> tuple[Tensor, Tensor]:
    """Return standard normal points (P, M + Dn) of local scalars, and their log weights (P,)."""
    size, mixing = hierarchy.normal_size, hierarchy.mixing_size
    if mixing:
        return _standardized(MIXED, mixing + size), torch.full((MIXED,), -math.log(MIXED))
    if size in NODES:
        count = round(NODES[size] * times**0.5)
        nodes, weights = gauss_hermite(count, torch.get_default_dtype())
        grid = torch.cartesian_prod(*[nodes] * size).view(-1, size)
        return grid, torch.cartesian_prod(*[weights.log()] * size).view(-1, size).sum(1)
    if not size:
        return torch.zeros(1, 0), torch.zeros(1)
    count = times * max(POINTS, 2 * size)
    if times == TIMES[-1] and size <= MOST_HEAVY:
        return _heavy(count, size)
    return _standardized(count, size), torch.full((count,), -math.log(count))


def _heavy(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Return points of a Student t, (P, D), and the log ratios of a Normal's density to its, (P,)."""
    normal, stretch = heavy_points(count, size, freedom=FREEDOM)
    points = normal * stretch
    square = points.square().sum(1)
    heavy = -0.5 * (FREEDOM + size) * torch.log1p(square / FREEDOM)
    return points, (-0.5 * square - heavy).log_softmax(0)


def _rotations(keys: Tensor, *shape: int) -> Tensor:
    """Return random rotations (..., D, D) by keys (..., 2)."""
    normals = noise.normals(keys, (*shape, shape[-1])).double()
    return torch.linalg.qr(normals)[0]


def _standardized(count: int, size: int) -> Tensor:
    """Return quasi-random standard normals with exact covariance, or variances if they are few."""
    points = normal_points(count, size)
    if count < ENOUGH * size:
        return points / points.square().mean(0).sqrt()
    tril = torch.linalg.cholesky(points.mT @ points / count)
    return torch.linalg.solve_triangular(tril, points.mT, upper=False).mT


@dataclass(frozen=True, eq=False)
class _Clients:
    """Clients, and where their local scalars lie given z."""

    hierarchy: Hierarchy
    rows: PackedRows | Quartic
    factor: tuple[Tensor, Tensor]
    fields: Values
    proposals: Proposal | None
    own: Tensor | None  # (C, M + Dn, M + Dn), rotations of quasi-random points

    def some(self, who: Tensor) -> _Clients:
        """Return the clients at some positions."""
        if len(who) == self.rows.clients:
            return self
        proposals = self.proposals and Proposal(*(v[who] for v in self.proposals))
        fields = {name: v[who] for name, v in self.fields.items()}
        factor = self.factor[0][who], self.factor[1][who]
        rows = self.rows.some(who)
        own = None if self.own is None else self.own[who]
        return _Clients(self.hierarchy, rows, factor, fields, proposals, own)

    def ratios(self, draws: Tensor) -> Ratios:
        """Return the ratios at draws (S, K), by as many points as each client needs."""
        points, log_weights = standard_points(self.hierarchy)
        size, count = points.shape[1], max(2, min(TRIED, len(draws) // TRIED))
        if is_sampled(self.hierarchy):
            count = TRIED
        if self.proposals is not None or not size:
            return self._at(draws, points, log_weights)
        some = draws[:: max(1, len(draws) // count)]
        sets = [standard_points(self.hierarchy, times) for times in TIMES]
        tolerance = ERROR / math.sqrt(self.hierarchy.program.num_clients)
        # the first set that agrees with the next; the last one where none does
        who = torch.arange(self.rows.clients)
        needed = torch.zeros_like(who)
        log = self._at(some, *sets[0]).log
        for finer_set in sets[1:]:
            finer = self.some(who)._at(some, *finer_set).log
            rough = (finer - log).std(1) >= tolerance
            who, log = who[rough], finer[rough]
            needed[who] += 1
            if not len(who):
                break
        log, error = torch.zeros(2, self.rows.clients, len(draws))
        for i in needed.unique().tolist():
            who = (needed == i).nonzero()[:, 0]
            log[who], error[who] = self.some(who)._at(draws, *sets[i])
        return Ratios(log, error)

    def _at(self, draws: Tensor, points: Tensor, log_weights: Tensor) -> Ratios:
        """Return the ratios at draws (S, K), by standard normal points (P, M + Dn)."""
        count, size = points.shape
        at_once = max(1, CONDITIONALS // (self.rows.clients * (size + 1) ** 2))
        of = self._normal
        if self.proposals is not None:
            at_once, of = max(1, at_once // count), self._mixed
        common = points[:0] if self.own is None else _rotations(noise.root_key(0), TURNS, size)
        ratios = []
        for s in torch.arange(len(draws)).split(at_once):
            turns = None if self.own is None else product(self.own[:, None], common[s % TURNS])
            ratios.append(of(draws[s], turns, points, log_weights))
        return Ratios(*(torch.cat(tensors, 1) for tensors in zip(*ratios, strict=True)))

    def _normal(
        self, draws: Tensor, turns: Tensor | None, points: Tensor, log_weights: Tensor
    ) -> Ratios:
        mean, tril = normals_of(self.hierarchy, self.fields, self.factor, draws)
        root = tril.mT if turns is None else product(turns, tril.mT)  # (C, S, D, D)
        ratios = []
        for p in torch.arange(len(draws)).split(self.rows.draws_at_once(len(points))):
            w = mean[:, p, None] + product(points, root[:, p])  # (C, s, P, D)
            ratios.append(
                _summed(self.log_ratio(draws[p], w), log_weights, self.halves(log_weights))
            )
        return Ratios(*(torch.cat(tensors, 1) for tensors in zip(*ratios, strict=True)))

    def _mixed(
        self, draws: Tensor, turns: Tensor | None, points: Tensor, log_weights: Tensor
    ) -> Ratios:
        """Return the ratios where clients have mixing variables: each point has its own weight."""
        assert turns is not None  # mixing variables are sampled
        h, sides = self.hierarchy, sides_of(len(log_weights), self.hierarchy)
        row = h.batch(self.fields, self.rows.clients)

        def at(z: Tensor, turn: Tensor) -> Any:
            at_side = partial(point, h, z, row, self.factor, self.proposals)
            return torch.vmap(at_side)((points @ turn).movedim(1, 0), sides)

        own, weight = torch.vmap(at)(draws, turns.movedim(1, 0))  # (S, P, C, D) and (S, P, C)
        log_weights = log_weights + weight.movedim(2, 0)
        log_ratio = self.log_ratio(draws, own.movedim(2, 0))
        return _summed(log_ratio, log_weights, self.halves(log_weights[0, 0]))

    def log_ratio(self, draws: Tensor, w: Tensor) -> Tensor:
        """Return log p(y | v) - log factor(v), (C, S, P), at w (C, S, P, D) and draws (S, K)."""
        u = draws[:, self.hierarchy.reading.shared]
        v = torch.cat([w, u[None, :, None].expand(*w.shape[:3], -1)], -1).flatten(1, 2)
        log_factor = ((self.factor[1][:, None] - 0.5 * product(v, self.factor[0])) * v).sum(-1)
        return (self.rows.values(v) - log_factor).view(w.shape[:3])

    def halves(self, log_weights: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return two halves of the points, each with all reflections; None of a sum's nodes."""
        of_nodes = self.hierarchy.normal_size in NODES and self.proposals is None
        if len(log_weights) == 1 or of_nodes:
            return None
        half = len(log_weights) // 2  # of a sequence: any other half of it leaves boxes empty
        second = torch.arange(len(log_weights)) % half >= half // 2
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
