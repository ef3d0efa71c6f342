"""The rows of many clients, packed, and the expectations of their log likelihoods.

Units (`hierfl.summaries.units`) are independent: the derivatives of their sum are those of each.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import inverse, product, upper_root
from hierfl.data.batch import ClientBatch
from hierfl.laplace.trials import nearly_equal, slopes_of
from hierfl.summaries.reading import QuadratureNodes, node_at_mean
from hierfl.summaries.units import Units, UnitScore

# scalars of one elementwise operation carried at once: 2 MB, which a core's cache holds
AT_ONCE = 1 << 18
POINTS = 256  # at which a block of clients is carried at once
MANY = 8  # units a client for which a product of matrices each pays
PADDED = 2  # slots of padded clients by row, at most, where clients are the units
STEP = 1e-4  # of differences of slopes
TRIES = 2  # random points
AWAY = 0.5  # their sd about the starting values, unconstrained
NATS, RELATIVE = 1e-3, 1e-6  # differences of log likelihoods that are rounding


class Expected(NamedTuple):
    """Expectations under Normal distributions of v, one for each of C clients."""

    value: Tensor  # (C,) E[log p(y | v)]
    slope: Tensor  # (C, V) E[d log p(y | v)]
    curvature: Tensor  # (C, V, V) -E[d^2 log p(y | v)]


class PackedRows:
    """The rows of C clients."""

    def __init__(self, score: UnitScore, units: Units, design: Tensor | None = None) -> None:
        self.score, self.line, self.units = score, score.line, units
        self.tensors, self.client = self.units.tensors, self.units.client
        self.clients = self.units.clients
        self.design = self._design() if design is None else design
        self.of_unit = score.of(self.units, self.design.shape[1])

    def some(self, who: Tensor) -> "PackedRows":
        """Return the rows of the clients at some positions (C',)."""
        if len(who) == self.clients:
            return self
        place = torch.full((self.clients,), -1).index_copy(0, who, torch.arange(len(who)))
        at = (place[self.client] >= 0).nonzero()[:, 0]
        units = self.units.some(at)
        units = replace(units, client=place[units.client], clients=len(who))
        return PackedRows(self.score, units, self.design[at])

    def thinned(self, by: int, least: int) -> "PackedRows":
        """Return one unit of `by`, for all that it stands for; `least` of each client, if it has them."""
        ends, counts = self._ends(), self.sizes
        stride = (counts // least).clamp(1, by)[self.client]
        place = torch.arange(len(self.client)) - (ends - counts)[self.client]
        at = (place % stride == 0).nonzero()[:, 0]
        units = self.units.some(at)
        times = torch.ones(len(at)) if units.times is None else units.times
        return PackedRows(self.score, replace(units, times=times * stride[at]), self.design[at])

    def blocks(self) -> tuple[Tensor, ...]:
        """Return positions of clients whose rows are few enough for many points at once."""
        ends = self._ends() * self._width
        sizes = torch.bincount((ends - 1).clamp(min=0) * POINTS // AT_ONCE)
        return torch.arange(self.clients).split(sizes[sizes > 0].tolist())

    @property
    def sizes(self) -> Tensor:
        """How many units each client has, (C,)."""
        return torch.bincount(self.client, minlength=self.clients)

    @property
    def _width(self) -> int:
        """How many scalars of a unit an operation carries: its predictors, or its rows."""
        return max(1, self.design.shape[1], self.units.rows)

    def _ends(self) -> Tensor:
        return self.sizes.cumsum(0)

    def over_units(self, function: Callable[..., Any], *trees: Any, in_dims: Any = 0) -> Any:
        """Map a function over units: at once, or one by one where the program cannot be mapped."""
        if self.score.in_vmap:
            return torch.vmap(function, in_dims=in_dims)(*trees)
        dims = in_dims if isinstance(in_dims, tuple) else (0,) * len(trees)
        count = next(len(t) for t, d in zip(trees, dims, strict=True) if d == 0)
        results = [
            function(*(t if d is None else t[i] for t, d in zip(trees, dims, strict=True)))
            for i in range(count)
        ]
        return torch.stack(results)

    def by_client(
        self, of_units: Tensor, total: Tensor | None = None, part: Tensor | slice = slice(None)
    ) -> Tensor:
        """Sum (n, ...) over each client's rows, or `part` of them, (C, ...), added to a `total`."""
        times = self.units.times
        if times is not None:
            of_units = of_units * times[part].view(-1, *[1] * (of_units.dim() - 1))
        if total is None:
            total = of_units.new_zeros(self.clients, *of_units.shape[1:])
        return total.index_add_(0, self.client[part], of_units)

    def _design(self) -> Tensor:
        """Return the coefficients of l in each unit's predictors, (n, p, L)."""
        size, line = len(self.line.inside), self.score.predictors
        if not size:
            return torch.zeros(len(self.client), 0, 0)

        def of_unit(*own: Tensor) -> Tensor:
            batch = self.units.batch(own)
            base = line(torch.zeros(size), batch)
            return slopes_of(lambda along: line(along, batch), base, size)

        design: Tensor = self.over_units(of_unit, *self.tensors)
        return design

    # ------------------------------------------------------------------------------ expectations
    def expected(self, mean: Tensor, precision: Tensor, nodes: QuadratureNodes) -> Expected:
        """Return expectations under Normal(mean, precision^-1); not finite if far nodes overflow."""
        shift, spread, points = self._nodes(mean, precision, nodes)
        n, size = len(self.client), nodes.rest.shape[0] * nodes.row.shape[0]
        width = max(1, size * self._width)
        total: Tensor | None = None
        for p in torch.arange(n).split(max(1, AT_ONCE // width)):
            derivatives = self._derivatives(shift[p], spread[p], points[self.client[p]], nodes, p)
            total = self._added(total, derivatives, p)
        assert total is not None
        expected = self._of_clients(total)
        if not nodes.by_slopes:
            return expected
        # by Stein's lemma E[x g'] = R' E[H] for slopes g at s = mean + R x
        root = self._root(precision).mT
        curvature = torch.linalg.solve_triangular(root, expected.curvature, upper=False)
        return expected._replace(curvature=0.5 * (curvature + curvature.mT))

    def at_mean(self, mean: Tensor, precision: Tensor) -> Expected:
        """Return value and derivatives at `mean` alone."""
        return self.expected(mean, precision, node_at_mean(self.line))

    def _nodes(self, mean: Tensor, precision: Tensor, nodes: QuadratureNodes) -> tuple[Tensor, ...]:
        """Return means (n, J, p) and sds (n, p) of predictors given s, and points of s (C, J, S)."""
        inside, rest, x, k = self.line.inside, self.line.rest, self.design, self.client
        points = mean[:, None, rest].expand(-1, len(nodes.rest), -1)
        if len(rest):
            points = points + nodes.rest @ self._root(precision).mT
        covariance = inverse(precision[:, inside][:, :, inside])[0]
        moved = (points - mean[:, None, rest]) @ precision[:, rest][:, :, inside] @ covariance
        at = mean[:, None, inside] - moved  # (C, J, L)
        shift = at[k] @ x.mT
        spread = ((x @ covariance[k]) * x).sum(-1).clamp(min=0.0).sqrt()
        return shift, spread, points

    def _root(self, precision: Tensor) -> Tensor:
        """Return R, upper triangular, of the covariance R R' of s, (C, S, S)."""
        rest = self.line.rest
        return upper_root(inverse(precision)[0][:, rest][:, :, rest])

    def _derivatives(
        self, shift: Tensor, spread: Tensor, points: Tensor, nodes: QuadratureNodes, part: Tensor
    ) -> list[Tensor]:
        """Return expectations (n,), (n, p), (n, p), (n, S), (n, S, p), (n, S, S) of some units."""
        own, size = [v[part] for v in self.tensors], points.shape[-1]
        row, weights = nodes.row, nodes.row_weights
        if not len(self.line.inside):
            row, weights = row[:1] * 0.0, torch.ones(1)

        def of_unit(eta: Tensor, rest: Tensor, *own: Tensor) -> Tensor:
            at = torch.vmap(lambda eta, rest: self.of_unit(eta, rest, *own), in_dims=(0, None))
            return torch.vmap(at)(eta, rest)

        @torch.enable_grad()
        def sloped(eta: Tensor, rest: Tensor, create: bool = True) -> tuple[Tensor, list[Tensor]]:
            for v in (eta, rest):
                v.requires_grad_()
            value = (self.over_units(of_unit, eta, rest, *own) @ weights) @ nodes.rest_weights
            return value, gradients(value.sum(), (eta, rest), create=create)

        def difference(of_eta: float, of_rest: Tensor) -> list[Tensor]:
            slopes = [
                sloped(eta.detach() + h * of_eta, rest.detach() + h * of_rest)[1]
                for h in (STEP, -STEP)
            ]
            return [(a - b).detach() / (2.0 * STEP) for a, b in zip(*slopes, strict=True)]

        eta = (shift[:, :, None] + row[:, None] * spread[:, None, None]).detach()
        rest, units = points.detach().clone(), torch.eye(size)
        if nodes.by_slopes:
            value, (none, slope) = sloped(eta, rest, create=False)
            by_eta = none.sum((1, 2))
            by_both = by_eta[:, None].expand(-1, size, -1)
            products = nodes.rest.mT @ slope
            return [value.detach(), by_eta, by_eta, slope.sum(1), by_both, products]
        with torch.enable_grad():
            value, slopes = sloped(eta, rest)
            second = gradients(slopes[0].sum(), (eta, rest))[0]
            along = [gradients(slopes[1], (eta, rest), unit) for unit in units]
        # of a branch that torch.where leaves out, and of 0**x, autograd has slopes, and then NaN
        if bool(second.isnan().any()):
            second = difference(1.0, torch.zeros(()))[0]
        if any(bool(v.isnan().any()) for of in along for v in of):
            along = [difference(0.0, unit) for unit in units]
        n, p, curvature = len(part), eta.shape[-1], second.sum((1, 2))
        has_none = (second == 0.0).all(1).all(1) & (spread > 0.0)
        if bool(has_none.any()):  # as of abs(): by Stein's lemma E f'' = E x f' / sd
            by_slopes = (slopes[0].detach() * row[:, None]).sum((1, 2)) / spread
            curvature = torch.where(has_none, by_slopes, curvature)
        cross = [a[0].sum((1, 2)) for a in along]
        rest_second = [a[1].sum(1) for a in along]
        return [
            value.detach(),
            slopes[0].detach().sum((1, 2)),
            curvature,
            slopes[1].detach().sum(1),
            torch.stack(cross, 1) if cross else value.new_zeros(n, 0, p),
            torch.stack(rest_second, 1) if rest_second else value.new_zeros(n, 0, 0),
        ]

    def _added(self, total: Tensor | None, terms: list[Tensor], part: Tensor) -> Tensor:
        """Add what `_derivatives` gives of some units to sums over clients, one row each."""
        value, slope, second, rest_slope, cross, rest_second = terms
        x = self.design[part]
        top = (x.mT * second[:, None]) @ x
        of_units = [value[:, None], (slope[:, None] @ x)[:, 0], rest_slope]
        of_units += [v.flatten(1) for v in (top, cross @ x, rest_second)]
        return self.by_client(torch.cat(of_units, 1), total, part)

    def _of_clients(self, total: Tensor) -> Expected:
        """Return sums of derivatives over clients, in l and s, by scalar of v."""
        order, size, others = self.line.order, len(self.line.inside), len(self.line.rest)
        widths = [1, size, others, size * size, others * size, others * others]
        value, slope, rest_slope, *blocks = total.split(widths, 1)
        top, corner, low = (
            b.reshape(self.clients, -1, width)
            if width
            else b.new_zeros(self.clients, others if i else 0, width)
            for i, (b, width) in enumerate(zip(blocks, (size, size, others), strict=True))
        )
        whole = torch.cat([torch.cat([top, corner.mT], 2), torch.cat([corner, low], 2)], 1)
        slope = torch.cat([slope, rest_slope], 1)[:, order]
        return Expected(value[:, 0], slope, -whole[:, order][:, :, order])

    def by_predictor(
        self, mean: Tensor, precision: Tensor, nodes: QuadratureNodes
    ) -> tuple[Tensor, Tensor]:
        """Return the expected first and second derivative in each predictor, (n, p) both."""
        shift, spread, points = self._nodes(mean, precision, nodes)
        every = torch.arange(len(self.client))
        _, slope, second, *_ = self._derivatives(shift, spread, points[self.client], nodes, every)
        return slope, second

    def summed(self, slope: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
        """Return slopes (C, V) and curvatures (C, V, V) of those by predictor, (n, p); s is empty."""
        x, order = self.design, self.line.order
        square = self.by_client((x.mT * curvature[:, None]) @ x)
        return self.by_client((slope[:, None] @ x)[:, 0])[:, order], square[:, order][:, :, order]

    # ------------------------------------------------------------------------------ values
    def values(self, at: Tensor) -> Tensor:
        """Return log p(y | v), (C, T), at v (C, T, V)."""
        w, u = at.tensor_split([self._own], -1)
        # what depends on u alone is computed once if u is shared
        same = self.clients == 1 or bool((u == u[:1]).all())
        return self.values_of(w, u[0] if same else u)

    def values_of(self, w: Tensor, u: Tensor) -> Tensor:
        """Return log p(y | v), (C, T), at w (C, T, W) and u (C, T, U), or (T, U) of all clients."""
        count = self.draws_at_once()
        parts = zip(w.split(count, 1), u.split(count, -2), strict=True)
        return torch.cat([self._values(*of) for of in parts], 1)

    @property
    def _own(self) -> int:
        return self.score.reading.own_size

    def draws_at_once(self, points: int = 1) -> int:
        """Return how many draws of so many points are carried at once."""
        return max(1, AT_ONCE // (len(self.client) * self._width * points))

    def _values(self, w: Tensor, u: Tensor) -> Tensor:
        if u.dim() == 2 and not len(self.line.inside):  # what is of u alone is computed once
            are_clients = len(self.client) == self.clients and self.units.times is None
            own, batch = w if are_clients else w[self.client], self.units.together
            each = torch.vmap(self.score.reading.log_likelihoods, (1, 0, None))(own, u, batch)
            return each.mT if are_clients else self.by_client(each.mT)
        rest = self._picked(w, u, self.line.rest)
        same, points = rest.dim() == 2, 0 if rest.shape[-1] else None
        rest = rest if same else rest[self.client]
        rest = rest if points == 0 else rest[0]  # what depends on a row alone is computed once

        def of_unit(eta: Tensor, rest: Tensor, *own: Tensor) -> Tensor:
            one = torch.vmap(lambda e, r: self.of_unit(e, r, *own), in_dims=(0, points))
            return one(eta, rest)

        dims = (0, None if same else 0, *[0] * len(self.tensors))
        eta = self._predictors(w, u)
        return self.by_client(self.over_units(of_unit, eta, rest, *self.tensors, in_dims=dims))

    def _picked(self, w: Tensor, u: Tensor, at: Tensor) -> Tensor:
        """Return entries `at` of v (C, T, V); (T, ...) where all are of a u (T, U), or none is."""
        if not len(at):
            return w[0, :, :0]
        if u.dim() == 2 and bool((at >= self._own).all()):
            return u[:, at - self._own]
        if bool((at < self._own).all()):
            return w[..., at]
        return torch.cat([w, u.expand(len(w), -1, -1)], -1)[..., at]

    @cached_property
    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Which entries of l are of w, (Lw,), and of u, (Lu,), and the design (n, p, ...) of each."""
        inside = self.line.inside
        of_w = inside < self._own
        return inside[of_w], inside[~of_w], self.design[..., of_w], self.design[..., ~of_w]

    def _predictors(self, w: Tensor, u: Tensor) -> Tensor:
        """Return the predictors from l = 0, (n, T, p), at w (C, T, W) and u (C, T, U), or (T, U)."""
        count, p = w.shape[1], self.design.shape[1]
        if not p:
            return self.design.new_zeros(len(self.client), count, 0)
        if u.dim() == 2:  # what is of u is one product for all clients
            own, shared, x, of_u = self._columns
            eta = of_u.flatten(0, 1) @ u[:, shared - self._own].mT if len(shared) else None
            line = w[..., own]
        else:
            line, x, eta = self._picked(w, u, self.line.inside), self.design, None
        if eta is not None and not line.shape[-1]:
            return eta.view(-1, p, count).mT
        flat = x.flatten(0, 1)
        if len(x) < MANY * self.clients or w.requires_grad or u.requires_grad:
            of_w = product(line[self.client], x.mT)
            return of_w if eta is None else of_w + eta.view(-1, p, count).mT
        eta = x.new_zeros(len(flat), count) if eta is None else eta
        ends = [0, *(self._ends() * p).tolist()]
        for k, (first, last) in enumerate(pairwise(ends)):
            eta[first:last].addmm_(flat[first:last], line[k].mT)
        return eta.view(-1, p, count).mT


def gradients(
    of: Tensor, inputs: tuple[Tensor, ...], weights: Tensor | None = None, *, create: bool = False
) -> list[Tensor]:
    """Return the derivatives of a weighted sum in the inputs, zeros where it has none in one."""
    if not of.requires_grad:
        return [torch.zeros_like(v) for v in inputs]
    # `grad_outputs=weights` would import sympy
    total = of if weights is None else (of * weights).sum()
    grads = torch.autograd.grad(
        total, inputs, retain_graph=True, create_graph=create, allow_unused=True
    )
    return [torch.zeros_like(v) if g is None else g for g, v in zip(grads, inputs, strict=True)]


def packed(score: UnitScore, batch: ClientBatch, *, distinct: bool = False) -> PackedRows:
    """Return the rows of a batch of C clients; if `distinct`, a client's equal rows once.

    Without a linear predictor, what depends on v alone is computed once for all rows of a client.
    """
    units = Units.of(batch, by_row=score.by_row)
    if distinct:
        units = _fewest(score, units)
    is_even = batch.num_clients * batch.num_rows <= PADDED * len(units.client)
    if score.by_row and units.times is None and not len(score.line.inside) and is_even:
        units = Units.of(batch, by_row=False)
    return PackedRows(score, units)


def _fewest(score: UnitScore, units: Units) -> Units:
    """Return equal rows once, or Normal rows that differ in their label alone as two."""
    distinct, label = units.distinct(), score.label_of_normal
    few = None if label is None else units.by_moments(label)
    if few is None or 2 * len(few.client) > len(distinct.client):
        return distinct
    g = torch.Generator().manual_seed(0)
    v = score.start + AWAY * torch.randn(TRIES, len(score.start), generator=g)
    values = (PackedRows(score, of).values(v.expand(of.clients, -1, -1)) for of in (few, distinct))
    return few if nearly_equal(*values) else distinct
