"""How clients' marginal likelihoods differ from those of their factors, at given global sites.

    log p(y_k | z) = log integral p(w | z) factor_k(v) dw + log E[ p(y_k | v) / factor_k(v) ]

The server knows the first term. The expectation is over p(w | z) factor_k(v), normalized, by the
same standard normal points at every z, so that errors largely cancel between two z.
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
ENOUGH = 4  # points a dimension for their covariance to be made the identity
# draws at which few points are compared with many; sd of the error of all clients, in nats
TRIED, ERROR = 32, 0.1
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
    whole = _Clients(hierarchy, rows, factor, fields, keys, proposals)
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
    keys: Tensor
    proposals: Proposal | None

    def some(self, who: Tensor) -> _Clients:
        """Return the clients at some positions."""
        if len(who) == self.rows.clients:
            return self
        proposals = self.proposals and Proposal(*(v[who] for v in self.proposals))
        fields = {name: v[who] for name, v in self.fields.items()}
        factor = self.factor[0][who], self.factor[1][who]
        rows = self.rows.some(who)
        return _Clients(self.hierarchy, rows, factor, fields, self.keys[who], proposals)

    def ratios(self, draws: Tensor) -> Ratios:
        """Return the ratios at draws (S, K), by as many points as each client needs."""
        points, log_weights = standard_points(self.hierarchy)
        size, count = points.shape[1], max(2, min(TRIED, len(draws) // TRIED))
        turns = torch.eye(size).expand(len(self.keys), size, size)
        if is_sampled(self.hierarchy):
            # without random rotations (C, M + Dn, M + Dn) clients err in the same direction
            key, count = noise.fold(self.keys, noise.word("two_stage.weigh")), TRIED
            turns = torch.linalg.qr(noise.normals(key, (size, size)).double())[0]
        if self.proposals is not None or not size:
            return self._at(draws, points @ turns, log_weights)
        some = draws[:: max(1, len(draws) // count)]
        sets = [standard_points(self.hierarchy, times) for times in TIMES]
        tolerance = ERROR / math.sqrt(self.hierarchy.program.num_clients)
        # the first set that agrees with the next; the last one where none does
        needed, who = torch.zeros(len(self.keys), dtype=torch.long), torch.arange(len(self.keys))
        log = self._at(some, sets[0][0] @ turns, sets[0][1]).log
        for e, w in sets[1:]:
            finer = self.some(who)._at(some, e @ turns[who], w).log
            rough = (finer - log).std(1) >= tolerance
            who, log = who[rough], finer[rough]
            needed[who] += 1
            if not len(who):
                break
        log, error = torch.zeros(2, len(self.keys), len(draws))
        for i in needed.unique().tolist():
            who, (e, w) = (needed == i).nonzero()[:, 0], sets[i]
            log[who], error[who] = self.some(who)._at(draws, e @ turns[who], w)
        return Ratios(log, error)

    def _at(self, draws: Tensor, points: Tensor, log_weights: Tensor) -> Ratios:
        """Return the ratios at draws (S, K), by standard normal points (C, P, M + Dn)."""
        count, size = points.shape[1:]
        at_once = max(1, CONDITIONALS // (self.rows.clients * (size + 1) ** 2))
        of = self._normal
        if self.proposals is not None:
            at_once, of = max(1, at_once // count), self._mixed
        ratios = [of(z, points, log_weights) for z in draws.split(at_once)]
        return Ratios(*(torch.cat(tensors, 1) for tensors in zip(*ratios, strict=True)))

    def _normal(self, draws: Tensor, points: Tensor, log_weights: Tensor) -> Ratios:
        mean, tril = normals_of(self.hierarchy, self.fields, self.factor, draws)
        ratios = []
        for p in torch.arange(len(draws)).split(self.rows.draws_at_once(points.shape[1])):
            w = mean[:, p, None] + product(points[:, None], tril[:, p].mT)  # (C, s, P, D)
            ratios.append(
                _summed(self.log_ratio(draws[p], w), log_weights, self.halves(log_weights))
            )
        return Ratios(*(torch.cat(tensors, 1) for tensors in zip(*ratios, strict=True)))

    def _mixed(self, draws: Tensor, points: Tensor, log_weights: Tensor) -> Ratios:
        """Return the ratios where clients have mixing variables: each point has its own weight."""
        h, sides = self.hierarchy, sides_of(len(log_weights), self.hierarchy)
        e, row = points.movedim(1, 0), h.batch(self.fields, self.rows.clients)  # (P, C, M + Dn)

        def at(z: Tensor) -> Any:
            at_side = partial(point, h, z, row, self.factor, self.proposals)
            return torch.vmap(at_side)(e, sides)

        own, weight = torch.vmap(at)(draws)  # (S, P, C, D) and (S, P, C)
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
