"""A client's own sites given the global ones, where its noise scale is its own: exact draws.

Let the scale g depend on one own number t. Given t and z the client's other numbers b are Normal,

    b = mu(t) + R^-T Q x,    x_i ~ Normal(k c_i(t) / (1 + k a_i), 1 / (1 + k a_i)),    k = g(t)^-2

with R R' their prior precision and Q diag(a) Q' = R^-1 A R^-T. So the density of t is known,

    log p(t | z, y) = log p(t | z) + N log(k) / 2 - k e(t) / 2
                      + sum_i [ k^2 c_i(t)^2 / (1 + k a_i) - log(1 + k a_i) ] / 2 + const,

e(t) the sum of squares at b = mu(t), and t is drawn by inverting its distribution function on a grid.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import LOG_2_PI, dot, inverse, product, roots, times
from hierfl.data.batch import ClientBatch
from hierfl.summaries.exact import Spread, pseudo_inverse
from hierfl.summaries.hierarchy import Hierarchy

FAR = 8.0  # prior sds that the first grid reaches
ZOOMS, COARSE, FINE = 4, 13, 61  # grids that narrow it, their points, and those of the last one
NOTHING = 14.0  # nats below the peak that a grid leaves out


def is_one_number(hierarchy: Hierarchy, spread: Spread) -> bool:
    """Return whether the noise scale depends on one own number of a client, Normal given z."""
    own = int((spread.line.rest < hierarchy.reading.own_size).sum())
    return own == 1 and hierarchy.mixing is None and hierarchy.reading.effects is None


class _Given(NamedTuple):
    """What is known of C clients' numbers given z."""

    mean: Tensor  # (C, D) of the prior, t among them
    slope: Tensor  # (C, D - 1) of mu in t
    back: Tensor  # (C, D - 1, D - 1) R^-T Q
    log_root: Tensor  # (C,) log |R|
    sd: Tensor  # (C,) of t in the prior
    a: Tensor  # (C, D - 1)
    c: tuple[Tensor, Tensor]  # (C, D - 1) c at the prior's mean of t, and its slope
    e: tuple[
        Tensor, Tensor, Tensor
    ]  # (C,) e at the prior's mean of t, its slope, and its curvature


def drawn(
    hierarchy: Hierarchy,
    spread: Spread,
    z: Tensor,
    own: dict[str, Tensor],
    row: ClientBatch,
    normals: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return own numbers w (C, D) by standard normals (C, D), and their log density (C,)."""
    others_at, size = spread.line.rest, hierarchy.reading.own_size
    every = torch.arange(size)
    at, others = others_at[:1], every[every != others_at[0]]
    u = z[hierarchy.reading.shared]
    law = _given(hierarchy, z, own, row, at, others)

    def precision_at(t: Tensor) -> Tensor:
        own_u = u[others_at[1:] - size]
        scale = torch.vmap(lambda s: spread.of(torch.cat([s[None], own_u])))(t.flatten())
        return scale.view(t.shape) ** -2

    def log_p(t: Tensor) -> Tensor:
        """Return the log density of t (C, G), up to a constant."""
        away, k = t - law.mean[:, at], precision_at(t)
        e = law.e[0][:, None] + away * (law.e[1][:, None] + away * law.e[2][:, None])
        ahead = law.c[0][:, None] + away[..., None] * law.c[1][:, None]
        share = k[..., None] * ahead.square() / (1.0 + k[..., None] * law.a[:, None])
        fit = 0.5 * k * (share.sum(-1) - e)
        log_det = 0.5 * torch.log1p(k[..., None] * law.a[:, None]).sum(-1)
        prior = -0.5 * (away / law.sd[:, None]).square()
        return prior + 0.5 * own["num_rows"][:, None] * k.log() + fit - log_det

    center, reach = law.mean[:, at], FAR * law.sd[:, None]
    t, log_q = _inverted(log_p, center - reach, center + reach, torch.special.ndtr(normals[:, :1]))
    away, k = t - law.mean[:, at], precision_at(t)
    narrow = 1.0 + k * law.a
    e = normals[:, 1:]
    x = k * (law.c[0] + away * law.c[1]) / narrow + e * narrow.rsqrt()
    b = law.mean[:, others] + away * law.slope + times(law.back, x)
    log_q = log_q + law.log_root + 0.5 * (narrow.log() - e.square() - LOG_2_PI).sum(-1)
    place = torch.argsort(torch.cat([at, others]))
    return torch.cat([t, b], 1)[:, place], log_q


def _given(
    hierarchy: Hierarchy,
    z: Tensor,
    own: dict[str, Tensor],
    row: ClientBatch,
    at: Tensor,
    others: Tensor,
) -> _Given:
    """Return the prior of own numbers given z, and what the sums say, in the coordinates x."""
    precision, shift = own["precision"], own["shift"]
    prior = hierarchy.local(z, row)
    mean = prior.mean.expand(len(shift), -1)
    count = len(others)
    within = prior.precision[:, others][:, :, others]
    root, back = roots(prior._replace(precision=within))
    if root.shape[-1] != count:  # of a diagonal one
        root, back = (torch.diag_embed(v[..., 0]) for v in (root, back))
    slope = -times(inverse(within)[0], prior.precision[:, others][:, :, at[0]])
    best = times(pseudo_inverse(precision), shift)
    here = torch.cat([mean, z[hierarchy.reading.shared].expand(len(shift), -1)], 1)
    over = shift - times(precision, best)  # the slope in directions that are not solved for
    turned = times(precision, best - here)  # no large numbers cancel
    lower = turned + over
    block = precision[:, others][:, :, others]
    a, turn = torch.linalg.eigh(product(back, product(back, block).mT))
    inward = turn.mT @ back
    along = times(block, slope.expand(len(shift), -1))
    e = own["square"] + dot(best - here, turned) - 2.0 * dot(over, here)
    return _Given(
        mean,
        slope.expand(len(shift), -1),
        inward.mT,
        root.diagonal(dim1=-2, dim2=-1).log().sum(-1),
        inverse(prior.precision)[0][:, at[0], at[0]].sqrt().expand(len(shift)),
        a.clamp(min=0.0),
        (times(inward, lower[:, others]), -times(inward, along)),
        (e, -2.0 * dot(lower[:, others], slope), dot(along, slope)),
    )


def _inverted(
    log_p: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Return draws (C, 1) of a density by uniform numbers (C, 1), and their log density (C,).

    It is linear between the points of a grid that grids from `low` to `high` (C, 1) have narrowed.
    """
    steps = torch.linspace(0.0, 1.0, COARSE, dtype=low.dtype)
    for _ in range(ZOOMS):
        at = log_p(low + (high - low) * steps)
        some = at > at.amax(1, keepdim=True) - NOTHING
        first = some.to(torch.int8).argmax(1, keepdim=True)
        last = COARSE - 1 - some.flip(1).to(torch.int8).argmax(1, keepdim=True)
        width = high - low
        high = low + width * steps[(last + 1).clamp(max=COARSE - 1)]
        low = low + width * steps[(first - 1).clamp(min=0)]
    t = low + (high - low) * torch.linspace(0.0, 1.0, FINE, dtype=low.dtype)
    at = log_p(t)
    height = (at - at.amax(1, keepdim=True)).exp()
    cell = (height[:, 1:] + height[:, :-1]) / 2
    reached = cell.cumsum(1)
    target = uniform * reached[:, -1:]
    i = (reached < target).sum(1, keepdim=True).clamp(max=FINE - 2)
    mass = cell.gather(1, i)
    share = ((target - reached.gather(1, i) + mass) / mass).clamp(0.0, 1.0)
    below, above = height.gather(1, i), height.gather(1, i + 1)
    now = (below.square() + share * (above.square() - below.square())).sqrt()
    part = share * (below + above) / (below + now)
    width = (high - low) / (FINE - 1)
    root = t.gather(1, i) + part * width
    return root, (now / (reached[:, -1:] * width)).log()[:, 0]
