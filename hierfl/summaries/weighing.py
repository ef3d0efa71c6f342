"""How a client's marginal likelihood differs from that of its factor, at given global sites.

    log p(y_k | z) = log integral p(w | z) factor_k(v) dw + log E[ p(y_k | v) / factor_k(v) ]

The server knows the first term. The expectation is over w ~ p(w | z) factor_k(v), normalised, which is Normal.
Its points come from the same standard normal points at every z, so that their errors largely cancel between
two z.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.importance_sampling import normal_points
from hierfl.laplace.trials import first_row
from hierfl.summaries.expectations import Rows, gauss_hermite
from hierfl.summaries.factor import Factor
from hierfl.summaries.hierarchy import Hierarchy

NODES = {1: 16, 2: 8}  # Gauss-Hermite nodes a dimension, by the number of local unknowns
POINTS = 64  # quasi-random points where there are more
NUMBERS_AT_ONCE = 1 << 21  # clients x draws x points x rows that are carried at once
CLIENTS = 512  # carried at once, where there are more


class Ratios(NamedTuple):
    """A client's marginal likelihoods over those of its factor, at S draws.

    log: (S,) log E[ p(y_k | v) / factor_k(v) ].
    effective: (S,) effective share of the points, 1 where the factor is exact.
    """

    log: Tensor
    effective: Tensor


def standard_points(size: int) -> tuple[Tensor, Tensor]:
    """Return standard normal points (M, D) and their log weights (M,), for D = `size` local unknowns."""
    dtype = torch.get_default_dtype()
    if size in NODES:
        nodes, weights = gauss_hermite(NODES[size], dtype)
        grid = torch.cartesian_prod(*[nodes] * size).view(-1, size)
        return grid, torch.cartesian_prod(*[weights.log()] * size).view(-1, size).sum(1)
    count = POINTS if size else 1
    points = normal_points(count, size) if size else torch.zeros(1, 0)
    return points, torch.full((count,), -math.log(count))


@dataclass(frozen=True, eq=False)
class Weigher:
    """Evaluates how a client's marginal likelihood differs from that of its factor.

    Args:
        hierarchy: the program's prior.
        points: (M, D), standard normal.
        log_weights: (M,), of the points.
    """

    hierarchy: Hierarchy
    points: Tensor
    log_weights: Tensor

    def ratios(self, rows: Rows, factor: Factor, draws: Tensor) -> Ratios:
        """Return the ratios of one client at draws of z, (S, K)."""
        hierarchy, batch = self.hierarchy, rows.batch
        own = first_row(batch)
        points, log_weights = self.points, self.log_weights

        def one(z: Tensor) -> Ratios:
            normal = hierarchy.local(z, own)
            given = hierarchy.given(normal, z, factor.precision[None], factor.shift[None])
            covariance = given.log_integral()[1]
            u = z[hierarchy.reading.shared]
            w = points
            if points.shape[1]:
                tril = torch.linalg.cholesky_ex(covariance[0]).L
                w = covariance[0] @ given.shift[0] + points @ tril.mT

            def ratio(w: Tensor) -> Tensor:
                v = torch.cat([w, u])
                return rows.log_likelihood_by_line(v) - factor.log(v)

            each = torch.vmap(ratio)(w) + log_weights
            effective = 1.0 / (2.0 * each.log_softmax(0) - log_weights).exp().sum()
            return Ratios(each.logsumexp(0), effective)

        clients = min(CLIENTS, hierarchy.program.num_clients)
        at_once = max(1, NUMBERS_AT_ONCE // (clients * len(points) * max(1, batch.num_rows)))
        found: Ratios = torch.vmap(one, chunk_size=at_once)(draws)
        return found
