"""How the curvature of clients' log likelihoods in their own scalars w moves with the global ones u.

A noise's scale and the slopes that multiply w change it by far more than the rows' own noise does:
with y ~ Normal(w, e^u) it is e^(-2 u). Along w(u) = center + drift (u - origin), as w moves with u, it
is taken as

    D(u) P D(u),    D_ii = e^(a_i / 2),    a = rates (u - origin),

with rates by differences of second differences of the log likelihoods. The slope there grows as
much: if it is g + G (u - origin) near the origin, it is taken as e^a (g + G (u - origin) - a g). Of a
noise's scale both are right. Of the u in a linear predictor the curvature is left as it is.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import Factor, times, times_one
from hierfl.summaries.factor import q_of
from hierfl.summaries.packed_rows import PackedRows
from hierfl.summaries.reading import Line, QuadratureNodes

MOST = 20.0  # of a curvature's log, smoothly: numbers stay finite
DIFFERENCES = 1000  # entries of a client's rates, at most
# steps of w, in sds, and the least of u, whose scalars are mostly logs of scales
STEP, LEAST_MOVE = 0.5, 0.2
KNOWN = 1e4  # times the precision of u where it is nearly known
SMALL = 1e-9  # eigenvalues that are nothing beside the largest
# what counts: share of a likelihood in a precision, and change of a curvature's log over two moves
SHARE, CHANGE = 0.05, 0.3


class Growth(NamedTuple):
    """Rates at which curvatures grow with u, along where w moves with it."""

    center: Tensor  # (N, W)
    slope: Tensor  # (N, W), g
    drift: Tensor  # (N, W, U)
    rates: Tensor  # (N, W, U)
    origin: Tensor  # (N, U), all the same

    @property
    def moves(self) -> Tensor:
        """Whether a client's curvature moves, (N,)."""
        return (self.rates != 0.0).flatten(1).any(1)

    def of(
        self, precision: Tensor, across: Tensor, shift: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return precisions (N, W, W) and shifts (N, W) of w at u (U,), of factors that do not grow.

        Args:
            precision: (N, W, W).
            across: (N, W, U), of w with u.
            shift: (N, W), at u = 0.
            u: (U,).
        """
        shift = shift - times_one(across, u)
        if not self.rates.shape[2]:
            return precision, shift
        away = u - self.origin[0]
        center, growth = self.center + times_one(self.drift, away), times_one(self.rates, away)
        slope = shift - times(precision, center) - growth * self.slope
        growth = MOST * (growth / MOST).tanh()
        scales = (0.5 * growth).exp()
        precision = scales[..., None] * precision * scales[:, None]
        return precision, times(precision, center) + growth.exp() * slope


def no_growth(clients: int, size: int) -> Growth:
    """Return curvatures of clients that do not move, of w (W,) = `size`."""
    none = torch.zeros(clients, size)
    return Growth(none, none, none[..., None][..., :0], none[..., None][..., :0], none[:, :0])


def moving(line: Line, size: int) -> list[int]:
    """Return the places in u of what may move the curvature in w (W = `size`,); none if they are many."""
    places = [j for j in (line.rest - size).tolist() if j >= 0]
    return places if size * len(places) <= DIFFERENCES else []


def at_origin(
    rows: PackedRows,
    nodes: QuadratureNodes,
    belief: tuple[Tensor, Tensor],
    factor_about: Callable[[tuple[Tensor, Tensor]], Factor],
    size: int,
) -> tuple[Factor, Growth]:
    """Return clients' factors with u at its mean, and how their curvatures grow.

    Args:
        rows: of N clients.
        nodes: by which expectations are computed.
        belief: of v = (w, u), m (V,) and C (V, V).
        factor_about: makes factors about a belief: where u is wide, they are of other curvatures.
        size: W.
    """
    precision = torch.linalg.inv_ex(belief[1]).inverse
    places = torch.tensor(moving(rows.line, size)) + size
    precision.diagonal()[places] += KNOWN / belief[1].diagonal()[places]
    nearly = belief[0], torch.linalg.inv_ex(precision).inverse
    factor = _of_own(rows, nodes, nearly, factor_about(nearly), size)
    return factor, _growth(rows, nearly, belief[1].diagonal()[size:].sqrt(), factor, size)


def _of_own(
    rows: PackedRows,
    nodes: QuadratureNodes,
    belief: tuple[Tensor, Tensor],
    factor: Factor,
    size: int,
) -> Factor:
    """Return factors whose parts of w are as expected: eigenvalues are raised in u alone where that will do."""
    mean, precision = q_of((belief[0], torch.linalg.inv_ex(belief[1]).inverse), factor)
    expected = rows.expected(mean, precision, nodes)
    # by slopes, digits are lost where u is nearly known
    curvature = rows.at_mean(mean, precision).curvature if nodes.by_slopes else expected.curvature
    across, rest = curvature[:, :size, size:].nan_to_num(), curvature[:, size:, size:].nan_to_num()
    values, vectors = torch.linalg.eigh(expected.curvature[:, :size, :size].nan_to_num())
    seen = values > SMALL * values.amax(1, keepdim=True).clamp(min=1e-300)
    across = vectors @ torch.where(seen[..., None], vectors.mT @ across, 0.0)
    inverse = _of_eigenvalues(torch.where(seen, 1.0 / torch.where(seen, values, 1.0), 0.0), vectors)
    through = across.mT @ inverse @ across
    left, turned = torch.linalg.eigh(rest - through)
    inside = torch.cat([_of_eigenvalues(torch.where(seen, values, 0.0), vectors), across], 2)
    beside = through + _of_eigenvalues(left.clamp(min=0.0), turned)
    whole = torch.cat([inside, torch.cat([across.mT, beside], 2)], 1)
    shift = expected.slope + times(whole, mean)
    usable = expected.value.isfinite() & shift.isfinite().all(1)
    return Factor(
        torch.where(usable[:, None, None], whole, factor.precision),
        torch.where(usable[:, None], shift, factor.shift),
        factor.raised,
    )


def _of_eigenvalues(values: Tensor, vectors: Tensor) -> Tensor:
    return (vectors * values[:, None]) @ vectors.mT


def _growth(
    rows: PackedRows, belief: tuple[Tensor, Tensor], sd: Tensor, factor: Factor, size: int
) -> Growth:
    """Return how curvatures grow about a belief times factors, where u has an `sd` (U,)."""
    mean, precision = q_of((belief[0], torch.linalg.inv_ex(belief[1]).inverse), factor)
    origin = belief[0][size:]
    inside, across = precision[:, :size].tensor_split([size], 2)
    covariance = torch.linalg.inv_ex(inside).inverse
    drift, rates = -covariance @ across, torch.zeros_like(across)
    center = mean[:, :size] + times(drift, origin - mean[:, size:])
    step = torch.diag_embed(STEP * covariance.diagonal(dim1=1, dim2=2).clamp(min=0.0).sqrt())
    points = center[:, None] + torch.cat([0.0 * step[:, :1], step, -step], 1)  # (N, 1 + 2 W, W)

    def curvature(away: Tensor) -> Tensor:
        """Return minus second differences (N, W) at u, away from the origin."""
        w, u = points + times_one(drift, away)[:, None], origin + away
        values = rows.values(torch.cat([w, u.expand(*w.shape[:2], -1)], 2))
        here, above, below = values.split([1, size, size], 1)
        return 2.0 * here - above - below

    for j in moving(rows.line, size):
        away = torch.zeros_like(origin)
        away[j] = sd[j].clamp(min=LEAST_MOVE)
        less, more = curvature(-away), curvature(away)
        seen = torch.minimum(less, more) > SHARE * STEP**2
        change = torch.where(seen, more / less, 1.0).log()
        rates[..., j] = torch.where(change.abs() > CHANGE, change, 0.0) / (2.0 * away[j])
    here = torch.cat([center, origin.expand(len(center), -1)], 1)
    slope = (factor.shift - times(factor.precision, here))[:, :size]
    return Growth(center, slope, drift, rates, origin.expand(len(center), -1))
