"""The prior of a program, and which global sites are jointly Normal with the local ones, by trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import Normal
from hierfl.data.batch import ClientBatch, in_double
from hierfl.laplace.trials import FAILS, nearly_equal, perturbed, trial
from hierfl.program.program import ProgramError
from hierfl.program.sites import LatentSite
from hierfl.program.traces import Site, scored
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.mixing import (
    SCATTERED,
    Mixing,
    NotNormal,
    means_of,
    normal_of,
    precision_of,
    unwrapped,
)
from hierfl.summaries.reading import Reading, start_of

NORMAL, ENTRYWISE, SAMPLED = "normal", "entrywise", "sampled"  # kinds of local sites
TRIES = 3  # random points
EXACT = 1e-6  # relative differences that are rounding
FAR = 0.7  # how far a site is moved to see what it changes


def seen_hierarchy(reading: Reading, nonlinear: frozenset[str] = frozenset()) -> Hierarchy:
    """Return a program's prior, tested at random points; sites in `nonlinear` are not linear.

    Refuse local sites that it cannot sample.
    """
    plain = Hierarchy(replace(reading, effects=None))
    with trial():
        g = torch.Generator().manual_seed(0)
        batch = in_double(plain.row)
        points = [point_of(reading, g) for _ in range(TRIES)]
        if reading.own_size:
            plain = _with_local(plain, points, batch, g)
        if plain.mixing is not None and reading.effects is not None:
            return seen_hierarchy(reading.without_effects, nonlinear)
        return _with_linear(replace(plain, reading=reading), points, batch, nonlinear)


# ------------------------------------------------------------------------------------ local sites
def _with_local(
    plain: Hierarchy, points: list[Point], batch: ClientBatch, g: torch.Generator
) -> Hierarchy:
    """Return the hierarchy with what was seen of its local sites."""
    hierarchy = _with_mixing(plain, points, batch)
    if hierarchy.normal_size:
        at = hierarchy.arrangement[: hierarchy.normal_size]
        ends = [
            [_locally(hierarchy, p, w, batch)[1] for w in (p.w, p.w.index_fill(0, at, 0.0))]
            for p in points
        ]
        hierarchy = replace(hierarchy, chained=(not all(alike_here(*end) for end in ends), False))
    for p in points:
        _check_normal(hierarchy, p, batch)
    _check_reads_no_rows(hierarchy, points[0], g)
    moved = perturbed(batch, names_of_labels=frozenset(), g=g)
    names = sorted(hierarchy.program.reads.model & set(batch.client_fields))
    fields = tuple(name for name in names if _changes(hierarchy, points[0], moved, name))
    return replace(hierarchy, fields=fields)


def _with_mixing(plain: Hierarchy, points: list[Point], batch: ClientBatch) -> Hierarchy:
    """Return the hierarchy with its mixing parameters: not Normal, or scaling other sites."""
    block = plain.program.latents.local_block
    sites = plain.sites(points[0].z, points[0].w, batch)
    kinds = {site.name: _kind(site, sites[site.name]["fn"]) for site in block.sites}
    hierarchy = _mixed(plain, kinds)
    for site in block.sites:
        if kinds[site.name] != SAMPLED and any(_bends(hierarchy, site, p, batch) for p in points):
            kinds[site.name] = SAMPLED
    return _mixed(plain, kinds)


def _mixed(plain: Hierarchy, kinds: dict[str, str]) -> Hierarchy:
    sampled = tuple(name for name, kind in kinds.items() if kind == SAMPLED)
    scattered = tuple(name for name, kind in kinds.items() if kind == ENTRYWISE)
    if not sampled and not scattered:
        return plain
    return replace(plain, mixing=Mixing(plain.program.latents.local_block, sampled, scattered))


def _kind(site: LatentSite, fn: Any) -> str:
    try:
        normal_of(fn)
    except NotNormal:
        free = torch.linspace(-2.0, 2.0, site.size).view(site.free_start.shape)
        real = torch.equal(site.transform(free), free)
        return ENTRYWISE if real and isinstance(unwrapped(fn), SCATTERED) else SAMPLED
    return NORMAL


def _bends(hierarchy: Hierarchy, site: LatentSite, p: Point, batch: ClientBatch) -> bool:
    """Return whether a site changes the spread of others, or moves their means nonlinearly."""
    block = hierarchy.program.latents.local_block
    mine = [s.name == site.name for s in block.sites for _ in range(s.size)]
    step = FAR * torch.tensor(mine).to(p.w.dtype)
    spreads, means = zip(
        *(_locally(hierarchy, p, p.w + by * step, batch) for by in (0.0, 1.0, 2.0)), strict=True
    )
    bent = not alike_here(means[2] - means[1], means[1] - means[0])
    return bent or not all(alike_here(a, b) for a, b in pairwise(spreads))


def _locally(
    hierarchy: Hierarchy, p: Point, w: Tensor, batch: ClientBatch
) -> tuple[Tensor, Tensor]:
    """Return what moving w (D,) may not change, and the means of the Normal sites, at fixed t."""
    t, own, raw = p.mixing(hierarchy), hierarchy.normal_sites, hierarchy.sites(p.z, w, batch)
    spreads, sites = [hierarchy.log_mixing(raw, t)], hierarchy.normals(raw, t)
    if not own:
        return spreads[0], torch.zeros(0)
    spreads.append(precision_of(own, sites)[0].flatten())
    return torch.cat(spreads), means_of(own, sites).flatten()


def _check_normal(hierarchy: Hierarchy, p: Point, batch: ClientBatch) -> None:
    """Check that the local prior at w is the Normal that was read off at 0, given t."""
    own, t, w = hierarchy.program.latents.local_block, p.mixing(hierarchy), p.w
    w = w[hierarchy.arrangement[: hierarchy.normal_size]]
    sites = hierarchy.normals(hierarchy.given(p.z, batch, t, w), t)
    names = [site.name for site in hierarchy.normal_sites]
    fns = ((sites[name], sites[name]["fn"].log_prob(sites[name]["value"])) for name in names)
    expected = sum((scored(*arguments).sum() for arguments in fns), torch.zeros(()))
    jacobians = own.unflatten(p.w[None, None])[1]
    expected = expected + sum(jacobians[name].sum() for name in names)
    if names and not alike_here(hierarchy.local(p.z, batch, t).log_prob(w)[0], expected):
        raise ProgramError(
            f"local site '{names[-1]}' cannot be integrated out by two_stage: its spread depends "
            "on another local site, or its mean is not linear in one. Give it a Normal or LogNormal "
            "prior whose mean is linear in other local sites, or use fedsvi with guides.structured"
        )


def _check_reads_no_rows(hierarchy: Hierarchy, p: Point, g: torch.Generator) -> None:
    """Check that the prior is the same on any row."""
    batch = in_double(hierarchy.program.prototype)
    moved = perturbed(batch, names_of_labels=frozenset(), g=g)
    rows = [
        replace(
            some_batch, fields={n: v[:, i : i + 1] for n, v in some_batch.fields.items()}, rows=None
        )
        for some_batch in (batch, moved)
        for i in range(batch.num_rows)
    ]
    rows = [replace(row, client_fields=batch.client_fields) for row in rows]
    first = _local(hierarchy, p, rows[0])
    for row in rows[1:]:
        if not same(first, _local(hierarchy, p, row)):
            site = hierarchy.program.latents.local_block.sites[0].name
            raise ProgramError(
                f"local site '{site}' cannot be integrated out by two_stage: its prior reads the "
                "client's rows. Let its prior read client fields alone, and the likelihood the "
                "rows, or use fedsvi with guides.structured"
            )


def _local(hierarchy: Hierarchy, p: Point, batch: ClientBatch) -> tuple[Tensor, ...]:
    """Return p(w | z, t), and the log density of t."""
    t = p.mixing(hierarchy)
    sites = hierarchy.given(p.z, batch, t)
    mean, precision, log_det, _ = hierarchy.local(p.z, batch, t, sites)
    return mean, precision, log_det, hierarchy.log_mixing(sites, t)


def _changes(hierarchy: Hierarchy, p: Point, batch: ClientBatch, name: str) -> bool:
    """Return whether a client field changes the prior of the local sites."""
    value, first = batch.client_fields[name], _local(hierarchy, p, batch)
    for other in (1.3 * value + 0.2,) if value.is_floating_point() else (value + 1, 0 * value):
        fields = {**batch.client_fields, name: other.to(value.dtype)}
        try:
            if not same(first, _local(hierarchy, p, replace(batch, client_fields=fields))):
                return True
        except FAILS:
            return True  # an unknown code: the program reads the field
    return False


# ------------------------------------------------------------------------------------- global sites
class Point(NamedTuple):
    """Where the prior is evaluated."""

    z: Tensor  # (K,)
    w: Tensor  # (D,) local parameters
    e: Tensor  # (D,), from which the mixing parameters of scattered sites are taken

    def mixing(self, hierarchy: Hierarchy) -> Tensor | None:
        """Return the mixing numbers there, (1, M)."""
        if hierarchy.mixing is None:
            return None
        outside = hierarchy.mixing.outside
        entrywise = hierarchy.mixing_size - len(outside)
        return torch.cat([self.w[outside], self.e[:entrywise]])[None]


def point_of(reading: Reading, g: torch.Generator) -> Point:
    """Return a random point of a program's parameters."""
    z, start = reading.origin.double(), start_of(reading).double()[: reading.own_size]
    w, e = (torch.randn(len(start), generator=g) for _ in range(2))
    return Point(z + 0.5 * torch.randn(len(z), generator=g), start + w, 0.5 * e)


def alike_here(value: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of a prior."""
    return nearly_equal(value, other, exact=EXACT)


def same(values: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether tensors are pairwise equal."""
    return all(alike_here(a, b) for a, b in zip(values, other, strict=True))


def _with_linear(
    hierarchy: Hierarchy, points: list[Point], batch: ClientBatch, nonlinear: frozenset[str]
) -> Hierarchy:
    """Return the hierarchy with the global sites that are jointly Normal with the local ones."""
    sites = [s for s in hierarchy.program.latents.global_block.sites if s.name not in nonlinear]
    zero = torch.zeros(hierarchy.reading.own_size)
    priors = [hierarchy.sites(p.z, zero, batch) for p in points]
    names = [s.name for s in sites if all(_is_normal(prior[s.name]["fn"]) for prior in priors)]
    hierarchy = replace(hierarchy, steady=True)  # nothing moves with no site

    def joint(linear: tuple[str, ...]) -> Hierarchy | None:
        made = replace(hierarchy, linear=linear)
        at_zero = [made.sites(p.z.index_fill(0, made.inside, 0.0), zero, batch) for p in points]
        means = [
            [means_of(made.linear_sites, prior) for prior in pair]
            for pair in zip(priors, at_zero, strict=True)
        ]
        chained = hierarchy.chained[0], not all(alike_here(*both) for both in means)
        made = replace(made, chained=chained)
        if chained[1]:
            slopes = [made.mean_slopes_at(p.z[made.outside]) for p in points]
            is_steady = all(alike_here(slopes[0], other) for other in slopes)
            made = replace(made, mean_slopes=slopes[0] if is_steady else None)
        slopes = []
        for p in points:
            if (slope := _joint_slopes(made, p, batch)) is None:
                return None
            slopes.append(slope)
        return replace(made, steady=all(alike_here(slope, slopes[0]) for slope in slopes))

    every = joint(tuple(names)) if names else hierarchy
    if every is not None:
        return every
    best = hierarchy
    for name in reversed(names):  # a site may be Normal given those that it depends on
        best = joint((name, *best.linear)) or best
    return best


def _is_normal(fn: Any) -> bool:
    try:
        normal_of(fn)
    except NotNormal:
        return False
    return True


class _Prior(NamedTuple):
    """A prior at one z."""

    sites: dict[str, Site]  # with Normal local parameters at 0
    local: Normal
    outside: list[Tensor]  # what may not change with m: other log densities, and all spreads


def _prior_at(linear: Hierarchy, z: Tensor, t: Tensor | None, batch: ClientBatch) -> _Prior:
    sites = linear.given(z, batch, t)
    log_global = linear.log_global(z, sites, without=linear.linear)
    spread, own = precision_of(linear.linear_sites, sites)[0], linear.local(z, batch, t, sites)
    return _Prior(sites, own, [log_global, linear.log_mixing(sites, t), spread, own.precision])


def _joint_slopes(linear: Hierarchy, p: Point, batch: ClientBatch) -> Tensor | None:
    """Return `slopes_at`; None where the prior at m is not what was read off at m = 0, or other densities change."""
    z, t = p.z, p.mixing(linear)
    m, s = z[linear.inside], z[linear.outside]
    here = _prior_at(linear, z, t, batch)
    at_zero = _prior_at(linear, linear.whole(0.0 * m, s), t, batch)
    if not same(here.outside, at_zero.outside):
        return None
    expected = linear.log_global(z, here.sites, without=()) - here.outside[0]
    slopes = linear.slopes_at(z, batch, t, at_zero.local.mean)
    moved = (slopes[:, : linear.normal_size] @ m[:, None])[..., 0]
    read_off = [linear.means(s, at_zero.sites).log_prob(m)[0], at_zero.local.mean + moved]
    return slopes if same(read_off, [expected, here.local.mean]) else None
