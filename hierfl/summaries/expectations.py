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
from torch.func import grad, jacrev, vjp

from hierfl.core.importance_sampling import normal_points
from hierfl.data.batch import ClientBatch
from hierfl.laplace.linear_predictors import (
    FAILS,
    SIZES,
    is_linear,
    moved_rows,
    predictors_of,
    trial,
)
from hierfl.laplace.links import all_linked, predictors, scores
from hierfl.laplace.trials import alike
from hierfl.program.traces import Site
from hierfl.summaries.reading import Reading, start_of

# Gauss-Hermite nodes of a predictor, and of s where it is one number: odd, so that the mean is one
# of them
ALONG_ROW, ALONE = 13, 9
FEW, MANY = 16, 64  # quasi-random points of s, beside linear predictors and without any
EXACT = 1e-8  # relative differences that are rounding, in double precision
TRIES = 2  # test points of each size


class Nodes(NamedTuple):
    """Standard normal points and their weights; the middle one of each kind is 0.

    rest: (J, S) of s.
    rest_weights: (J,).
    row: (G,) of a predictor.
    row_weights: (G,).
    """

    rest: Tensor
    rest_weights: Tensor
    row: Tensor
    row_weights: Tensor


class Expected(NamedTuple):
    """Expectations under a Normal distribution of v.

    slope: (V,) E[d log p(y | v)].
    curvature: (V, V) -E[d^2 log p(y | v)].
    """

    slope: Tensor
    curvature: Tensor


@dataclass(frozen=True, eq=False)
class Line:
    """Which entries of v enter a likelihood through linear predictors alone.

    Args:
        reading: what the likelihood reads.
        inside: (L,) int64, positions in v of those entries.
    """

    reading: Reading
    inside: Tensor

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

    def whole(self, line: Tensor, rest: Tensor) -> Tensor:
        """Return v of l (L,) and s (S,)."""
        return torch.cat([line, rest])[self.order]

    def terms(self, line: Tensor, rest: Tensor, batch: ClientBatch) -> dict[str, Site]:
        """Return the likelihood's sites of one client at l (L,) and s (S,), by name."""
        return self.reading.terms(self.whole(line, rest), batch)


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
    return torch.as_tensor(nodes, dtype=dtype), torch.as_tensor(
        weights / weights.sum(), dtype=dtype
    )


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one client, with their linear predictors.

    Args:
        line: the entries of v in linear predictors.
        batch: the client's rows.
        design: (n, L), the predictors' coefficients of l, site after site.
    """

    line: Line
    batch: ClientBatch
    design: Tensor

    def log_likelihood(self, v: Tensor) -> Tensor:
        """Return log p(y | v), ()."""
        return self.line.reading.log_likelihood(v, self.batch)

    def log_likelihood_by_line(self, v: Tensor) -> Tensor:
        """Return the same by the linear predictors; mapped over l, the program runs once."""
        line = self.line
        if not len(line.inside):
            return self.log_likelihood(v)
        return self._shifted(self.design @ v[line.inside], v[line.rest])

    def _shifted(self, shift: Tensor, rest: Tensor) -> Tensor:
        """Return the log likelihood at s (S,), with predictors moved by `shift` (n,) from l = 0."""
        if not len(self.line.inside):
            return self.log_likelihood(rest)
        terms = self.line.terms(torch.zeros(len(self.line.inside)), rest, self.batch)
        return scores(terms, predictors(terms) + shift).sum()

    def at_mean(self, mean: Tensor, precision: Tensor) -> Expected:
        """Return the derivatives at the mean (V,) alone."""
        return self.expected(mean, precision, node_at_mean(self.line))[0]

    def expected(self, mean: Tensor, precision: Tensor, nodes: Nodes) -> tuple[Expected, Expected]:
        """Return expectations under Normal(mean, precision^-1), and values at the mean (V,)."""
        summed, middle = self._by_predictor(mean, precision, nodes)
        return self._of_numbers(*summed), self._of_numbers(*middle)

    def by_row(self, mean: Tensor, precision: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """Return expected first and minus second derivatives per predictor, (n,); s is empty."""
        slope, _, second, _, _ = self._by_predictor(mean, precision, nodes)[0]
        return slope, -second

    def _by_predictor(
        self, mean: Tensor, precision: Tensor, nodes: Nodes
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return what `_derivatives` gives, expected and at the mean."""
        inside, rest = self.line.inside, self.line.rest
        center, points = mean[rest], mean[rest].expand(len(nodes.rest), -1)
        if len(rest):
            covariance = torch.linalg.inv_ex(precision).inverse[rest][:, rest]
            points = points + nodes.rest @ torch.linalg.cholesky_ex(covariance).L.mT
        shift = torch.zeros(len(points), len(self.design))
        spread = torch.zeros(len(self.design))
        if len(inside):
            tril = torch.linalg.cholesky_ex(precision[inside][:, inside]).L
            moved = (points - center) @ precision[rest][:, inside]
            shift = (mean[inside] - torch.cholesky_solve(moved.mT, tril).mT) @ self.design.mT
            away = torch.linalg.solve_triangular(tril, self.design.mT, upper=False)
            spread = away.square().sum(0).sqrt()
        row = nodes.row if len(inside) else nodes.row[:1] * 0.0
        row_weights = nodes.row_weights if len(inside) else torch.ones(1)

        def at_point(point: Tensor, shift: Tensor) -> tuple[tuple[Tensor, ...], ...]:
            found = torch.vmap(lambda g: self._derivatives(shift + g * spread, point))(row)
            summed = tuple(torch.tensordot(row_weights, v, 1) for v in found)
            return summed, tuple(v[len(row) // 2] for v in found)

        summed, middle = torch.vmap(at_point)(points, shift)
        weights = nodes.rest_weights
        return (
            tuple(torch.tensordot(weights, v, 1) for v in summed),
            tuple(v[len(points) // 2] for v in middle),
        )

    def _of_numbers(
        self, slope: Tensor, rest_slope: Tensor, second: Tensor, cross: Tensor, rest_second: Tensor
    ) -> Expected:
        """Return what `_derivatives` gives by predictor, by entry of v."""
        of_line, order = slope @ self.design, self.line.order
        corner = cross @ self.design  # (S, L)
        top = torch.cat([(self.design.mT * second) @ self.design, corner.mT], 1)
        whole = torch.cat([top, torch.cat([corner, rest_second], 1)])
        return Expected(torch.cat([of_line, rest_slope])[order], -whole[order][:, order])

    def _derivatives(self, shift: Tensor, rest: Tensor) -> tuple[Tensor, ...]:
        """Return first and second derivatives of the log likelihood in the predictors and in s.

        They are (n,), (S,), (n,) (a diagonal, as a row depends on its own predictor alone), (S, n),
        (S, S).
        """
        (slope, rest_slope), pull = vjp(grad(self._shifted, (0, 1)), shift, rest)[:2]
        second = pull((torch.ones_like(shift), torch.zeros_like(rest)))[0]
        if not len(self.line.rest):
            none = torch.zeros(0, len(shift)), torch.zeros(0, 0)
            return slope, rest_slope, second, *none
        axes = torch.eye(len(rest), dtype=rest.dtype)
        cross, rest_second = torch.vmap(lambda a: pull((torch.zeros_like(shift), a)))(axes)
        return slope, rest_slope, second, cross, rest_second


def rows_of(line: Line, batch: ClientBatch) -> Rows:
    """Return the rows of one client with the coefficients of their linear predictors."""
    if not len(line.inside):
        return Rows(line, batch, torch.zeros(0, 0))
    rest = start_of(line.reading)[line.rest]
    read = predictors_of(partial(line.terms, rest=rest, batch=batch), len(line.inside))
    return Rows(line, batch, read.design)


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
    slopes = torch.stack([jacrev(lambda v: predictors(reading.terms(v, batch)))(v) for v in points])
    constant = ((slopes - slopes[0]).abs() <= EXACT * (1.0 + slopes[0].abs())).all(0).all(0)
    for v in points[: len(SIZES)]:
        eta = predictors(reading.terms(v, batch))
        for j in constant.nonzero()[:, 0].tolist():
            other = v.clone()
            other[j] += 0.7
            constant[j] &= alike(*(scores(reading.terms(at, batch), eta) for at in (v, other)))
    line = Line(reading, constant.nonzero()[:, 0])
    straight = not len(line.inside) or all(
        is_linear(partial(line.terms, rest=v[line.rest], batch=batch), v[line.inside])
        for v in points
    )
    return line if straight else None
