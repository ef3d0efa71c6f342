"""What the prior of a program is, found by evaluating it at random points."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pyro
import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.laplace.trials import alike, perturbed
from hierfl.program.few_rows import double_precision, in_double
from hierfl.program.handlers import untouched_store
from hierfl.program.program import ProgramError
from hierfl.program.sites import LatentSite
from hierfl.program.traces import Site, scored
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.normal_sites import NotNormal, means_of, normal_of, precision_of
from hierfl.summaries.reading import Reading

TRIES, EXACT = 3, 1e-6  # random points, and relative differences that are rounding
FAR = 0.7  # how far a site is moved to see what it changes
FAILS = (RuntimeError, ValueError, NotImplementedError, TypeError, AttributeError, IndexError)


def seen_hierarchy(reading: Reading) -> Hierarchy:
    """Return the prior of a program whose local sites are Normal given the global ones.

    The answer is tested at random points, not proven.

    Raises:
        ProgramError: a local site is not Normal in unconstrained numbers, or its prior reads a client's rows;
            the message names the site.
    """
    plain = Hierarchy(replace(reading, effects=None))
    with untouched_store(), torch.no_grad(), pyro.validation_enabled(False), double_precision():
        g = torch.Generator().manual_seed(0)
        batch = in_double(plain.row)
        points = [_point(reading, g) for _ in range(TRIES)]
        if reading.own_size:
            plain = _with_local(plain, points, batch, g)
        found = replace(plain, reading=reading)
        found = _with_linear(found, [z for z, _ in points], batch)
        return _with_constants(found, [z for z, _ in points], batch)


def _point(reading: Reading, g: torch.Generator) -> tuple[Tensor, Tensor]:
    z = reading.origin.double()
    return z + 0.5 * torch.randn(len(z), generator=g), torch.randn(reading.own_size, generator=g)


# ------------------------------------------------------------------------------------ local sites
def _with_local(
    plain: Hierarchy, points: list[tuple[Tensor, Tensor]], batch: ClientBatch, g: torch.Generator
) -> Hierarchy:
    """Return the hierarchy with what was seen of its local sites."""
    own = plain.program.latents.local_block.sites
    for z, w in points:
        sites = plain.sites(z, w, batch)
        for site in own:
            try:
                normal_of(sites[site.name]["fn"])
            except NotNormal as error:
                raise _refused(site.name, f"its prior is a {error}") from None
    chained = any(_moves(plain, own, z, w, batch) for z, w in points)
    found = replace(plain, chained=(chained, False))
    for z, w in points:
        _check_normal(found, z, w, batch)
    _check_reads_no_rows(found, points[0][0], g)
    moved = perturbed(batch, names_of_labels=frozenset(), g=g)
    return replace(found, fields=_fields_read(found, points[0][0], moved))


def _moves(
    plain: Hierarchy, own: tuple[LatentSite, ...], z: Tensor, w: Tensor, batch: ClientBatch
) -> bool:
    """Return whether the mean of a local site differs between two values of the local sites."""
    one, other = (means_of(own, plain.sites(z, at, batch)) for at in (w, 0.0 * w))
    return not _alike(one, other)


def _check_normal(found: Hierarchy, z: Tensor, w: Tensor, batch: ClientBatch) -> None:
    """Check that the prior of the local sites at w is the Normal that was read off at 0."""
    own = found.program.latents.local_block
    normal = found.local(z, batch)
    made = normal.log_prob(w)[0]
    sites = found.sites(z, w, batch)
    known = _log_prob([sites[site.name] for site in own.sites])
    known = known + sum(j.sum() for j in own.unflatten(w[None, None])[1].values())
    if not _alike(made, known):
        last = own.sites[-1].name
        raise _refused(
            last, "its spread depends on another local site, or its mean is not linear in one"
        )


def _log_prob(sites: list[Site]) -> Tensor:
    each = (scored(site, site["fn"].log_prob(site["value"])).sum() for site in sites)
    return sum(each, torch.zeros(()))


def _check_reads_no_rows(found: Hierarchy, z: Tensor, g: torch.Generator) -> None:
    """Check that the prior is the same on any row."""
    batch = in_double(found.program.prototype)
    moved = perturbed(batch, names_of_labels=frozenset(), g=g)
    rows = [
        replace(one, fields={n: v[:, i : i + 1] for n, v in one.fields.items()}, rows=None)
        for one in (batch, moved)
        for i in range(batch.num_rows)
    ]
    rows = [replace(row, client_fields=batch.client_fields) for row in rows]
    first = found.local(z, rows[0])
    for row in rows[1:]:
        if not _same(first, found.local(z, row)):
            site = found.program.latents.local_block.sites[0].name
            raise _refused(site, "its prior reads the client's rows")


def _fields_read(found: Hierarchy, z: Tensor, batch: ClientBatch) -> tuple[str, ...]:
    """Return the client fields that change the prior of the local sites."""
    known = found.program.reads.model
    return tuple(
        name
        for name in sorted(batch.client_fields)
        if name in known and _changes(found, z, batch, name)
    )


def _changes(found: Hierarchy, z: Tensor, batch: ClientBatch, name: str) -> bool:
    value, first = batch.client_fields[name], found.local(z, batch)
    for other in (1.3 * value + 0.2,) if value.is_floating_point() else (value + 1, 0 * value):
        fields = {**batch.client_fields, name: other.to(value.dtype)}
        try:
            if not _same(first, found.local(z, replace(batch, client_fields=fields))):
                return True
        except FAILS:
            return True  # a code that the program does not know: it reads the field, somewhere
    return False


# ------------------------------------------------------------------------------------ global sites
def _with_linear(found: Hierarchy, points: list[Tensor], batch: ClientBatch) -> Hierarchy:
    """Return the hierarchy with the global sites that are jointly Normal with the local ones, given the rest."""
    sites = found.program.latents.global_block.sites
    names = [site.name for site in sites]
    kept = [n for n in names if all(_is_normal(found, z, n, batch) for z in points)]
    kept = [n for n in kept if all(_is_linear(found, z, n, kept, batch) for z in points)]
    if not kept:
        return found
    linear = replace(found, linear=tuple(kept))
    chained = any(_is_chained(linear, z) for z in points)
    linear = replace(linear, chained=(found.chained[0], chained))
    return linear if all(_is_joint(linear, z, batch) for z in points) else found


def _is_normal(found: Hierarchy, z: Tensor, name: str, batch: ClientBatch) -> bool:
    sites = found.sites(z, torch.zeros(found.reading.own_size), batch)
    try:
        normal_of(sites[name]["fn"])
    except NotNormal:
        return False
    return True


def _is_linear(found: Hierarchy, z: Tensor, name: str, kept: list[str], batch: ClientBatch) -> bool:
    """Return whether a global site moves only means, in straight lines."""
    one = replace(found, linear=(name,))
    step = FAR * torch.zeros_like(z).index_fill(0, one.inside, 1.0)
    rest, spreads, means = zip(
        *(_felt(found, z + by * step, name, kept, batch) for by in (0.0, 1.0, 2.0)), strict=True
    )
    still = all(_alike(a, b) for v in (rest, spreads) for a, b in pairwise(v))
    return still and _alike(means[2] - means[1], means[1] - means[0])


def _felt(
    found: Hierarchy, z: Tensor, name: str, kept: list[str], batch: ClientBatch
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what must stay when a site moves, all spreads, and all means."""
    sites = found.sites(z, torch.zeros(found.reading.own_size), batch)
    rest = found.log_global(z, sites, without=tuple(kept))
    others = tuple(s for s in found.program.latents.global_block.sites if s.name in kept)
    own = found.local(z, batch)
    spreads = [own.precision.flatten(), precision_of(others, sites)[0].flatten()]
    return rest, torch.cat(spreads), torch.cat([own.mean.flatten(), means_of(others, sites)[0]])


def _is_chained(linear: Hierarchy, z: Tensor) -> bool:
    sites, w = linear.linear_sites, torch.zeros(linear.reading.own_size)
    other = z.index_fill(0, linear.inside, 0.0)
    one, two = (means_of(sites, linear.sites(at, w, linear.row)) for at in (z, other))
    return not _alike(one, two)


def _is_joint(linear: Hierarchy, z: Tensor, batch: ClientBatch) -> bool:
    """Return whether log p(z) and the means of the local sites are at z what was read off at m = 0."""
    m, s = z[linear.inside], z[linear.outside]
    sites = linear.sites(z, torch.zeros(linear.reading.own_size), batch)
    made = linear.means(s).log_prob(m)[0]
    known = linear.log_global(z, sites, without=())
    rest = linear.log_global(z, sites, without=linear.linear)
    at_zero = linear.local(linear.whole(0.0 * m, s), batch).mean
    along = torch.stack(
        [linear.local(linear.whole(axis, s), batch).mean - at_zero for axis in torch.eye(len(m))]
    )
    mean = at_zero + torch.tensordot(m, along, 1)
    return _alike(made, known - rest) and _alike(mean, linear.local(z, batch).mean)


def _with_constants(found: Hierarchy, points: list[Tensor], batch: ClientBatch) -> Hierarchy:
    """Return the hierarchy with what need not be evaluated at every s."""
    normals = [found.local(z, batch) for z in points]
    diagonal = all(
        bool((n.precision == torch.diag_embed(n.precision.diagonal(dim1=-2, dim2=-1))).all())
        for n in normals
    )
    slopes = [found.slopes_at(z, batch) for z in points]
    same = not found.fields and all(_alike(one, slopes[0]) for one in slopes)
    return replace(found, diagonal=diagonal, slopes=slopes[0][0] if same else None)


def _alike(one: Tensor, other: Tensor) -> bool:
    return alike(one, other, exact=EXACT)


def _same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(_alike(a, b) for a, b in zip(one, other, strict=True))


def _refused(site: str, why: str) -> ProgramError:
    return ProgramError(
        f"local site '{site}' cannot be integrated out by two_stage: {why}. Give it a Normal or LogNormal prior "
        f"whose mean is linear in other local sites, or use fedsvi with guides.structured"
    )
