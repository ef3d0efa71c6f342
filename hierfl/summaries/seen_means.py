"""Which global sites are jointly Normal with the local ones, given the others, by trial."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.laplace.trials import nearly_equal
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.normal_sites import NotNormal, means_of, normal_of, precision_of
from hierfl.summaries.reading import Reading

EXACT = 1e-6  # relative differences that are rounding
FAR = 0.7  # how far a site is moved to see what it changes


class Point(NamedTuple):
    """Where the prior is evaluated.

    z: (K,).
    w: (D,) local parameters.
    e: (D,), from which the mixing parameters of scattered sites are taken.
    """

    z: Tensor
    w: Tensor
    e: Tensor

    def mixing(self, hierarchy: Hierarchy) -> Tensor | None:
        """Return the mixing numbers there, (1, M)."""
        if hierarchy.mixing is None:
            return None
        outside = hierarchy.mixing.outside
        more = hierarchy.mixing_size - len(outside)
        return torch.cat([self.w[outside], self.e[:more]])[None]


def point_of(reading: Reading, g: torch.Generator) -> Point:
    """Return a random point of a program's parameters."""
    z = reading.origin.double()
    size = reading.own_size
    start = reading.program.latents.local_block.start.flatten().double() if size else z[:0]
    w, e = (torch.randn(size, generator=g) for _ in range(2))
    return Point(z + 0.5 * torch.randn(len(z), generator=g), start + w, 0.5 * e)


def alike_here(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of a prior."""
    return nearly_equal(one, other, exact=EXACT)


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Return whether tensors are pairwise equal."""
    return all(alike_here(a, b) for a, b in zip(one, other, strict=True))


def with_linear(found: Hierarchy, points: list[Point], batch: ClientBatch) -> Hierarchy:
    """Return the hierarchy with the global sites that are jointly Normal with the local ones."""
    sites = found.program.latents.global_block.sites
    names = [site.name for site in sites]
    kept = [n for n in names if all(_is_normal(found, p.z, n, batch) for p in points)]
    kept = [n for n in kept if all(_is_linear(found, p, n, kept, batch) for p in points)]
    if not kept:
        return found
    linear = replace(found, linear=tuple(kept))
    chained = any(_is_chained(linear, p.z) for p in points)
    linear = replace(linear, chained=(found.chained[0], chained))
    return linear if all(_is_joint(linear, p, batch) for p in points) else found


def _is_normal(found: Hierarchy, z: Tensor, name: str, batch: ClientBatch) -> bool:
    sites = found.sites(z, torch.zeros(found.reading.own_size), batch)
    try:
        normal_of(sites[name]["fn"])
    except NotNormal:
        return False
    return True


def _is_linear(found: Hierarchy, p: Point, name: str, kept: list[str], batch: ClientBatch) -> bool:
    """Return whether a global site moves only means, and those linearly."""
    one = replace(found, linear=(name,))
    step = FAR * torch.zeros_like(p.z).index_fill(0, one.inside, 1.0)
    rest, spreads, means = zip(
        *(_felt(found, p._replace(z=p.z + by * step), kept, batch) for by in (0.0, 1.0, 2.0)),
        strict=True,
    )
    still = all(alike_here(a, b) for v in (rest, spreads) for a, b in pairwise(v))
    return still and alike_here(means[2] - means[1], means[1] - means[0])


def _felt(
    found: Hierarchy, p: Point, kept: list[str], batch: ClientBatch
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what must stay when a site moves, all spreads, and all means."""
    sites, t = found.sites(p.z, torch.zeros(found.reading.own_size), batch), p.mixing(found)
    rest = found.log_global(p.z, sites, without=tuple(kept))
    rest = torch.cat([rest[None], found.log_mixing(p.z, batch, t)])
    others = tuple(s for s in found.program.latents.global_block.sites if s.name in kept)
    own = found.local(p.z, batch, t)
    spreads = [own.precision.flatten(), precision_of(others, sites)[0].flatten()]
    return rest, torch.cat(spreads), torch.cat([own.mean.flatten(), means_of(others, sites)[0]])


def _is_chained(linear: Hierarchy, z: Tensor) -> bool:
    sites, w = linear.linear_sites, torch.zeros(linear.reading.own_size)
    other = z.index_fill(0, linear.inside, 0.0)
    one, two = (means_of(sites, linear.sites(at, w, linear.row)) for at in (z, other))
    return not alike_here(one, two)


def _is_joint(linear: Hierarchy, p: Point, batch: ClientBatch) -> bool:
    """Return whether log p(z) and the local means at z match what was read off at m = 0."""
    z, t = p.z, p.mixing(linear)
    m, s = z[linear.inside], z[linear.outside]
    sites = linear.sites(z, torch.zeros(linear.reading.own_size), batch)
    made = linear.means(s).log_prob(m)[0]
    known = linear.log_global(z, sites, without=())
    rest = linear.log_global(z, sites, without=linear.linear)
    at_zero = linear.local(linear.whole(0.0 * m, s), batch, t).mean
    along = torch.stack(
        [linear.local(linear.whole(axis, s), batch, t).mean - at_zero for axis in torch.eye(len(m))]
    )
    mean = at_zero + torch.tensordot(m, along, 1)
    return alike_here(made, known - rest) and alike_here(mean, linear.local(z, batch, t).mean)
