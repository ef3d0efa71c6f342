"""The prior of a program, found by evaluating it at random points."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.laplace.trials import FAILS, perturbed, trial
from hierfl.program.few_rows import in_double
from hierfl.program.program import ProgramError
from hierfl.program.sites import LatentSite
from hierfl.program.traces import Site, scored
from hierfl.summaries.effects import check_centered
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.mixing import SCATTERED, Mixing
from hierfl.summaries.normal_sites import NotNormal, means_of, normal_of, precision_of, unwrapped
from hierfl.summaries.reading import Reading
from hierfl.summaries.seen_means import FAR, Point, alike_here, point_of, same, with_linear

NORMAL, ENTRYWISE, SAMPLED = "normal", "entrywise", "sampled"  # kinds of local sites
TRIES = 3  # random points


def seen_hierarchy(reading: Reading) -> Hierarchy:
    """Return the prior of a program, and what its local sites are Normal given.

    The answer is tested at random points, not proven.

    Raises:
        ProgramError: the local sites are not Normal given what can be sampled, or their prior reads
            a client's rows; the message names the site.
    """
    plain = Hierarchy(replace(reading, effects=None))
    with trial():
        g = torch.Generator().manual_seed(0)
        batch = in_double(plain.row)
        points = [point_of(reading, g) for _ in range(TRIES)]
        if reading.own_size:
            plain = _with_local(plain, points, batch, g)
        if plain.mixing is not None:
            check_centered(plain.program, reading.shared, plain.mixing.normal)
            if reading.effects is not None:
                raise _not_centered(plain.mixing)
        found = replace(plain, reading=reading)
        found = with_linear(found, points, batch)
        return _with_constants(found, points, batch)


# ------------------------------------------------------------------------------------ local sites
def _with_local(
    plain: Hierarchy, points: list[Point], batch: ClientBatch, g: torch.Generator
) -> Hierarchy:
    """Return the hierarchy with what was seen of its local sites."""
    found = _with_mixing(plain, points, batch)
    if found.normal_size:
        chained = any(not alike_here(*_means(found, p, batch)) for p in points)
        found = replace(found, chained=(chained, False))
    for p in points:
        _check_normal(found, p, batch)
    _check_reads_no_rows(found, points[0], g)
    moved = perturbed(batch, names_of_labels=frozenset(), g=g)
    return replace(found, fields=_fields_read(found, points[0], moved))


def _with_mixing(plain: Hierarchy, points: list[Point], batch: ClientBatch) -> Hierarchy:
    """Return the hierarchy with its mixing parameters: not Normal, or scaling other sites."""
    block = plain.program.latents.local_block
    sites = plain.sites(points[0].z, points[0].w, batch)
    kinds = {site.name: _kind(site, sites[site.name]["fn"]) for site in block.sites}
    found = _mixed(plain, kinds)
    for site in block.sites:
        if kinds[site.name] != SAMPLED and any(_bends(found, site, p, batch) for p in points):
            kinds[site.name] = SAMPLED
    return _mixed(plain, kinds)


def _mixed(plain: Hierarchy, kinds: dict[str, str]) -> Hierarchy:
    sampled, scattered = (
        tuple(name for name, kind in kinds.items() if kind == wanted)
        for wanted in (SAMPLED, ENTRYWISE)
    )
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


def _bends(found: Hierarchy, site: LatentSite, p: Point, batch: ClientBatch) -> bool:
    """Return whether a site changes the spread of others, or moves their means nonlinearly."""
    block = found.program.latents.local_block
    mine = [s.name == site.name for s in block.sites for _ in range(s.size)]
    step = FAR * torch.tensor(mine).to(p.w.dtype)
    spreads, means = zip(
        *(_locally(found, p, p.w + by * step, batch) for by in (0.0, 1.0, 2.0)), strict=True
    )
    bent = not alike_here(means[2] - means[1], means[1] - means[0])
    return bent or not all(alike_here(a, b) for a, b in pairwise(spreads))


def _locally(found: Hierarchy, p: Point, w: Tensor, batch: ClientBatch) -> tuple[Tensor, Tensor]:
    """Return what moving w (D,) may not change, and the means of the Normal sites, at fixed t."""
    t, mixing = p.mixing(found), found.mixing
    sites = found.sites(p.z, w, batch)
    if mixing is None or t is None:
        own = found.program.latents.local_block.sites
        return precision_of(own, sites)[0].flatten(), means_of(own, sites).flatten()
    own, given = mixing.normal_sites, mixing.given(sites, t)
    if not own:
        return mixing.log_p(sites, t), torch.zeros(0)
    spreads = [precision_of(own, given)[0].flatten(), mixing.log_p(sites, t)]
    return torch.cat(spreads), means_of(own, given).flatten()


def _means(found: Hierarchy, p: Point, batch: ClientBatch) -> tuple[Tensor, Tensor]:
    """Return the means of the Normal local sites at two values of these."""
    t, own = p.mixing(found), found.program.latents.local_block.sites
    if found.mixing is not None:
        own = found.mixing.normal_sites
    w = p.w if found.mixing is None else p.w[found.mixing.normal]
    one, other = (means_of(own, found.local_sites(p.z, at, batch, t)) for at in (w, 0.0 * w))
    return one, other


def _check_normal(found: Hierarchy, p: Point, batch: ClientBatch) -> None:
    """Check that the local prior at w is the Normal that was read off at 0, given t."""
    own, t = found.program.latents.local_block, p.mixing(found)
    w, held = p.w, tuple[str, ...]()
    if found.mixing is not None:
        w, held = p.w[found.mixing.normal], found.mixing.sampled
    sites = found.local_sites(p.z, w, batch, t)
    names = [site.name for site in own.sites if site.name not in held]
    known = _log_prob([sites[name] for name in names])
    jacobians = own.unflatten(p.w[None, None])[1]
    known = known + sum(jacobians[name].sum() for name in names)
    if names and not alike_here(found.local(p.z, batch, t).log_prob(w)[0], known):
        raise _refused(
            names[-1], "its spread depends on another local site, or its mean is not linear in one"
        )


def _log_prob(sites: list[Site]) -> Tensor:
    each = (scored(site, site["fn"].log_prob(site["value"])).sum() for site in sites)
    return sum(each, torch.zeros(()))


def _check_reads_no_rows(found: Hierarchy, p: Point, g: torch.Generator) -> None:
    """Check that the prior is the same on any row."""
    batch = in_double(found.program.prototype)
    moved = perturbed(batch, names_of_labels=frozenset(), g=g)
    rows = [
        replace(one, fields={n: v[:, i : i + 1] for n, v in one.fields.items()}, rows=None)
        for one in (batch, moved)
        for i in range(batch.num_rows)
    ]
    rows = [replace(row, client_fields=batch.client_fields) for row in rows]
    first = _local(found, p, rows[0])
    for row in rows[1:]:
        if not same(first, _local(found, p, row)):
            site = found.program.latents.local_block.sites[0].name
            raise ProgramError(
                f"local site '{site}' cannot be integrated out by two_stage: its prior reads the "
                "client's rows. Let its prior read client fields alone, and the likelihood the "
                "rows, or use fedsvi with guides.structured"
            )


def _local(found: Hierarchy, p: Point, batch: ClientBatch) -> tuple[Tensor, ...]:
    """Return p(w | z, t), and the log density of t."""
    t = p.mixing(found)
    return (*found.local(p.z, batch, t), found.log_mixing(p.z, batch, t))


def _fields_read(found: Hierarchy, p: Point, batch: ClientBatch) -> tuple[str, ...]:
    """Return the client fields that change the prior of the local sites."""
    known = found.program.reads.model
    return tuple(
        name
        for name in sorted(batch.client_fields)
        if name in known and _changes(found, p, batch, name)
    )


def _changes(found: Hierarchy, p: Point, batch: ClientBatch, name: str) -> bool:
    value, first = batch.client_fields[name], _local(found, p, batch)
    for other in (1.3 * value + 0.2,) if value.is_floating_point() else (value + 1, 0 * value):
        fields = {**batch.client_fields, name: other.to(value.dtype)}
        try:
            if not same(first, _local(found, p, replace(batch, client_fields=fields))):
                return True
        except FAILS:
            return True  # an unknown code: the program reads the field
    return False


def _with_constants(found: Hierarchy, points: list[Point], batch: ClientBatch) -> Hierarchy:
    """Return the hierarchy with what need not be evaluated at every s."""
    normals = [found.local(p.z, batch, p.mixing(found)) for p in points]
    diagonal = all(
        bool((n.precision == torch.diag_embed(n.precision.diagonal(dim1=-2, dim2=-1))).all())
        for n in normals
    )
    slopes = [found.slopes_at(p.z, batch, p.mixing(found)) for p in points]
    everywhere = not found.fields and all(alike_here(one, slopes[0]) for one in slopes)
    known = slopes[0] if slopes[0].dim() == 2 else slopes[0][0]
    return replace(found, diagonal=diagonal, slopes=known if everywhere else None)


def _refused(site: str, why: str) -> ProgramError:
    return ProgramError(
        f"local site '{site}' cannot be integrated out by two_stage: {why}. Give it a Normal or "
        "LogNormal prior whose mean is linear in other local sites, or use fedsvi with "
        "guides.structured"
    )


def _not_centered(mixing: Mixing) -> ProgramError:
    site = (*mixing.sampled, *mixing.scattered)[0]
    return ProgramError(
        f"local site '{site}' is not Normal, and the program is non-centered: two_stage takes "
        "either, not both. Write the centered form, in which the likelihood reads the local sites "
        "as they are, or use fedsvi with guides.structured"
    )
