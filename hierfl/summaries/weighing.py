"""How a client's marginal likelihood differs from that of its factor, at given global sites.

    log p(y_k | z) = log integral p(w | z) factor_k(v) dw + log E[ p(y_k | v) / factor_k(v) ]

The server knows the first term. The expectation is over p(w | z) factor_k(v), normalized. Its
points come from the same standard normal points at every z, so that their errors largely cancel
between two z.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.importance_sampling import normal_points
from hierfl.data.batch import ClientBatch
from hierfl.laplace.trials import first_row
from hierfl.summaries.conditional import Proposal, points_of_one, sides_of
from hierfl.summaries.expectations import Rows, gauss_hermite
from hierfl.summaries.factor import Factor
from hierfl.summaries.hierarchy import Hierarchy

NODES = {1: 16, 2: 8}  # Gauss-Hermite nodes a dimension, by the number of local unknowns
POINTS = 128  # quasi-random points where there are more
MIXED = 128  # the same where some are mixing numbers
ENOUGH = 4  # points a dimension for their covariance to be made the identity
NUMBERS_AT_ONCE = 1 << 22  # clients x draws x points x rows that are carried at once
CLIENTS = 128  # carried at once, about, where there are more


class Ratios(NamedTuple):
    """A client's marginal likelihoods over those of its factor, at S draws.

    log: (S,) log E[ p(y_k | v) / factor_k(v) ]. error: (S,) its error, from the difference of two
    halves of the points; 0 for a sum over nodes. Points
        together have moments that halves lack, so it is too large rather than too small.
    """

    log: Tensor
    error: Tensor


def standard_points(size: int, mixing: int = 0) -> tuple[Tensor, Tensor]:
    """Return standard normal points (P, M + Dn) and their log weights (P,).

    `size` is Dn, the number of Normal local parameters, and `mixing` M.
    """
    dtype = torch.get_default_dtype()
    if mixing:
        return _standardized(MIXED, mixing + size), torch.full((MIXED,), -math.log(MIXED))
    if size in NODES:
        nodes, weights = gauss_hermite(NODES[size], dtype)
        grid = torch.cartesian_prod(*[nodes] * size).view(-1, size)
        return grid, torch.cartesian_prod(*[weights.log()] * size).view(-1, size).sum(1)
    count = POINTS if size else 1
    points = _standardized(count, size) if size else torch.zeros(1, 0)
    return points, torch.full((count,), -math.log(count))


def _standardized(count: int, size: int) -> Tensor:
    """Return quasi-random standard normal points whose covariance is the identity, or variances 1.

    Otherwise all clients would err in the same direction if their likelihoods are Gaussian with
    another spread than their factors.
    """
    points = normal_points(count, size)
    if count < ENOUGH * size:
        return points / points.square().mean(0).sqrt()
    tril = torch.linalg.cholesky(points.mT @ points / count)
    return torch.linalg.solve_triangular(tril, points.mT, upper=False).mT


@dataclass(frozen=True, eq=False)
class Weigher:
    """Evaluates how a client's marginal likelihood differs from that of its factor.

    Args:
        hierarchy: the program's prior.
        points: (P, M + Dn), standard normal.
        log_weights: (P,), of the points.
    """

    hierarchy: Hierarchy
    points: Tensor
    log_weights: Tensor

    def __post_init__(self) -> None:
        """Build cached tensors outside torch.func transforms."""
        _ = self.sampled, self.halves

    def ratios(
        self, rows: Rows, factor: Factor, draws: Tensor, proposals: Proposal | None = None
    ) -> Ratios:
        """Return the ratios of one client at draws of z (S, K), given its mixing proposals."""
        hierarchy, batch = self.hierarchy, rows.batch
        own, given = first_row(batch), (factor.precision[None], factor.shift[None])
        of_one = None if proposals is None else Proposal(*(v[:, None] for v in proposals))
        points, sides = self._turned(batch), sides_of(len(self.points), hierarchy)

        def one(z: Tensor) -> Ratios:
            found = points_of_one(hierarchy, z, own, given, of_one, points, sides)

            def ratio(w: Tensor) -> Tensor:
                v = torch.cat([w, z[hierarchy.reading.shared]])
                return rows.log_likelihood_by_line(v) - factor.log(v)

            log_weights = self.log_weights + found.log_weight
            each = torch.vmap(ratio)(found.own) + log_weights
            whole = each.logsumexp(0) - log_weights.logsumexp(0)
            if not self.sampled:
                return Ratios(whole, torch.zeros_like(whole))
            half, other = (each[h].logsumexp(0) - log_weights[h].logsumexp(0) for h in self.halves)
            return Ratios(whole, 0.5 * (half - other))

        clients = min(CLIENTS, hierarchy.program.num_clients)
        at_once = max(1, NUMBERS_AT_ONCE // (clients * len(self.points) * max(1, batch.num_rows)))
        found: Ratios = torch.vmap(one, chunk_size=at_once)(draws)
        return found

    @cached_property
    def sampled(self) -> bool:
        """Whether the points are quasi-random, and not the nodes of a sum."""
        return len(self.points) > 1 and bool((self.log_weights == self.log_weights[0]).all())

    @cached_property
    def halves(self) -> tuple[Tensor, Tensor]:
        """Positions of two halves of the points, (P / 2,); reflections stay together."""
        second = torch.arange(len(self.points)) // 2 % 2 == 1
        return (~second).nonzero()[:, 0], second.nonzero()[:, 0]

    def _turned(self, batch: ClientBatch) -> Tensor:
        """Return the points; quasi-random ones are rotated at random for each client.

        Otherwise the clients' errors would have the same direction, and add up.
        """
        if not self.sampled:
            return self.points
        size = self.points.shape[1]
        key = noise.fold(batch.key, noise.word("two_stage.weigh"))
        return self.points @ torch.linalg.qr(noise.normals(key, (size, size))[0])[0]
