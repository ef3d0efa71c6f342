"""Expectations of a client's log likelihood and its derivatives under a Normal distribution of v.

The entries of v = (l, s) are of two kinds. Row i depends on l only through a linear predictor,
eta_i = base_i(s) + x_i . l. Given s, that predictor is Normal, so an expectation is a
one-dimensional Gauss-Hermite sum per row. Expectations over s are sums over a few points: none if s
is empty, Gauss-Hermite nodes for one entry, quasi-random points for several. Without a linear
predictor s is all of v.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from hierfl.core.importance_sampling import normal_points
from hierfl.data.batch import ClientBatch
from hierfl.laplace.links import all_linked, predictors, scores
from hierfl.laplace.trials import FAILS, SIZES, is_linear, moved_rows, nearly_equal, trial
from hierfl.program.traces import Site
from hierfl.summaries.reading import Reading, start_of

ALONG_ROW, ALONE = 13, 9  # Gauss-Hermite nodes of a predictor, and of an s of one; odd: with 0
FEW, MANY = 16, 64  # quasi-random points of s, beside linear predictors and without any
EXACT = 1e-8  # relative differences that are rounding, in double precision
TRIES = 2  # test points of each size


class Nodes(NamedTuple):
    """Standard normal points and their weights; the middle one of each kind is 0."""

    rest: Tensor  # (J, S) of s
    rest_weights: Tensor  # (J,)
    row: Tensor  # (G,) of a predictor
    row_weights: Tensor  # (G,)


@dataclass(frozen=True, eq=False)
class Line:
    """Which entries of v enter a likelihood through linear predictors alone."""

    reading: Reading
    inside: Tensor  # (L,) int64, positions in v of those entries

    def __post_init__(self) -> None:
        """Build cached tensors outside torch.func transforms."""
        _ = self.rest, self.order

    @cached_property
    def rest(self) -> Tensor:
        """Positions in v of all other entries, (S,) int64."""
        others = set(range(self.reading.size)) - set(self.inside.tolist())
        return torch.tensor(sorted(others), dtype=torch.long)

    @cached_property
    def order(self) -> Tensor:
        """Where each entry of v lies in (l, s), (V,) int64."""
        return torch.argsort(torch.cat([self.inside, self.rest]))

    def terms(self, line: Tensor, rest: Tensor, batch: ClientBatch) -> dict[str, Site]:
        """Return the likelihood's sites of one client at l (L,) and s (S,), by name."""
        return self.reading.terms(torch.cat([line, rest])[self.order], batch)


def nodes_of(line: Line) -> Nodes:
    """Return the nodes at which expectations are summed."""
    size, dtype = len(line.rest), torch.get_default_dtype()
    if size == 1:
        rest, rest_weights = gauss_hermite(ALONE, dtype)
        rest = rest[:, None]
    elif size:
        points = normal_points(FEW if len(line.inside) else MANY, size)
        half = len(points) // 2
        rest = torch.cat([points[:half], torch.zeros(1, size), points[half:]])
        rest_weights = torch.full((len(rest),), 1.0 / len(points))
        rest_weights[half] = 0.0  # only there to be the middle
    else:
        rest, rest_weights = torch.zeros(1, 0), torch.ones(1)
    return Nodes(rest, rest_weights, *gauss_hermite(ALONG_ROW, dtype))


def node_at_mean(line: Line) -> Nodes:
    """Return the one node at the mean of v."""
    return Nodes(torch.zeros(1, len(line.rest)), torch.ones(1), torch.zeros(1), torch.ones(1))


def gauss_hermite(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return nodes and weights (count,) of the expectation of a function of a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    weights = weights / weights.sum()
    return torch.as_tensor(nodes, dtype=dtype), torch.as_tensor(weights, dtype=dtype)


def seen_line(reading: Reading) -> Line:
    """Find by trial which entries of v enter a likelihood through linear predictors alone."""
    none = Line(reading, torch.zeros(0, dtype=torch.long))
    with trial():
        g = torch.Generator().manual_seed(0)
        batch = moved_rows(reading.program, g)
        try:
            return _tried(reading, batch, g) or none
        except FAILS:
            return none


def _tried(reading: Reading, batch: ClientBatch, g: torch.Generator) -> Line | None:
    start, sizes = start_of(reading).double(), [reading.own_size, len(reading.shared)]
    points = []
    for far in SIZES * TRIES:
        w, u = torch.randn(reading.size, generator=g).split(sizes)
        points.append(start + torch.cat([far * w, 0.5 * u]))
    if not all_linked(reading.terms(points[0], batch)):
        return None
    slopes = torch.stack(
        [jacobian(lambda v: predictors(reading.terms(v, batch)), v) for v in points]
    )
    constant = ((slopes - slopes[0]).abs() <= EXACT * (1.0 + slopes[0].abs())).all(0).all(0)
    for v in points[: len(SIZES)]:
        eta = predictors(reading.terms(v, batch))
        for j in constant.nonzero()[:, 0].tolist():
            other = v.clone()
            other[j] += 0.7
            one, two = (scores(reading.terms(at, batch), eta) for at in (v, other))
            constant[j] &= nearly_equal(one, two)
    line = Line(reading, constant.nonzero()[:, 0])
    for v in points if len(line.inside) else ():
        if not is_linear(partial(line.terms, rest=v[line.rest], batch=batch), v[line.inside]):
            return None
    return line
