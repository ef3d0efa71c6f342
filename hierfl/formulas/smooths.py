"""Smooth terms, `s(x)` and `gp(x)`: the columns, sites, priors and lines of the program."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
from torch import Tensor

from hierfl.formulas.expressions import Call, DesignTerm, Name
from hierfl.formulas.schema import Schema
from hierfl.formulas.signatures import LONG, SHORT
from hierfl.formulas.transforms import FLOOR, Smooth
from hierfl.formulas.writer import ProgramWriter, check_one, independent
from hierfl.models.families import as_source
from hierfl.models.priors import Prior

if TYPE_CHECKING:
    from hierfl.formulas.declaration import Group

TAIL = 0.01  # prior probability beyond each end of the length scales that sines can have


def named_smooth(call: Call, schema: Schema) -> tuple[DesignTerm, ...]:
    """Return the terms of a smooth, lines first."""
    name, constants = str(call), schema.transforms[str(call)]
    is_spline = call.callee == "s"
    size = len(constants.knots) - 2 if is_spline else constants.degree
    by = call.option("by")
    levels = schema.columns[by.head].levels if isinstance(by, Name) else ()
    made_of = frozenset([call])
    numbers = tuple(map(str, range(1, size + 1)))
    coords = tuple(f"{level}:{n}" for level in levels for n in numbers) or numbers
    smooth = Smooth(call.callee, size, levels, constants, by is not None)
    curves = DesignTerm(name, labels(name, coords), coords, made_of, smooth=smooth)
    if not is_spline:
        return (curves,)
    line = f"linear_{name}"
    coords = levels or ((by.head, f"{by.head}:{call.args[0]}") if isinstance(by, Name) else ())
    return DesignTerm(line, labels(line, coords) or (line,), coords, made_of), curves


def check_constants(terms: Sequence[DesignTerm]) -> None:
    """Refuse a column beside a smooth by that column, of which it is a part already."""
    every = {column for term in terms for column in term.columns}
    for line, curves in pairwise(terms):
        if curves.smooth and curves.smooth.kind == "s" and not curves.smooth.levels:
            for name in {*line.coords[:1]} & every:
                what = f"'{curves.name}' already includes the effect of '{name}', as in mgcv"
                raise ValueError(f"{what}: take the term '{name}' out")


def labels(name: str, coords: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a term's columns."""
    return tuple(f"{name}[{label}]" for label in coords)


# ------------------------------------------------------------ priors
def length_prior(smooth: Smooth) -> dist.InverseGamma:
    """Return the prior of a length scale, as brms's: 1% below the shortest of the sines, 1% above the longest."""
    half = (smooth.constants.knots[1] - smooth.constants.knots[0]) / 2.0
    boundary = smooth.constants.boundary
    ends = SHORT * boundary / smooth.size / half, LONG * (boundary / half - 1.0)
    shape, rate = _inverse_gamma(*ends)
    return dist.InverseGamma(float(f"{shape:.6g}"), float(f"{rate * half:.6g}"))


@lru_cache(maxsize=64)
def _inverse_gamma(low: float, high: float) -> tuple[float, float]:
    """Return shape and rate with TAIL below `low`, and TAIL above `high`."""
    from scipy.optimize import brentq  # slow to import
    from scipy.stats import invgamma

    def ratio(log_shape: float) -> float:
        ends = invgamma.ppf([TAIL, 1.0 - TAIL], math.exp(log_shape))
        return math.log(ends[1] / ends[0]) - math.log(high / low)

    shape = math.exp(brentq(ratio, -2.0, 12.0))
    return shape, low / float(invgamma.ppf(TAIL, shape))


# ------------------------------------------------------------ groups
def entries_of(
    group: "Group", terms: Sequence[DesignTerm], columns: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return what has a standard deviation of its own in a group, and the place of each column's."""
    owner = {c: t.name for t in terms if t.smooth for c in t.columns}
    if group.correlated:
        curve, fix = next(iter(owner.values())), f"write ({group.terms} || {group.name})"
        raise ValueError(f"the term '{group.text}' has '{curve}', which has no correlations: {fix}")
    if lost := [t.name for t in terms if t.smooth and t.smooth.has_by]:
        fix = "leave by= out, or let it stand alone"
        raise ValueError(f"the term '{group.text}' has '{lost[0]}': {fix}")
    names = [owner.get(column, column) for column in columns]
    entries = tuple(dict.fromkeys(names))
    return entries, tuple(map(entries.index, names))


# ------------------------------------------------------------ the program
def write_smooth(
    out: ProgramWriter, term: DesignTerm, priors: Mapping[str, Prior], outputs: int
) -> None:
    """Write the scales of a common smooth, and its coefficients."""
    assert term.smooth is not None
    check_one(term.name, outputs, "use bs(x, df=5)")
    levels, sites = term.smooth.levels, term.scale_sites
    for site in sites.values():
        shape = [len(levels)] if levels else []
        names = labels(site, levels) or (site,)
        out.sample(site, independent(priors, names, shape), note=", ".join(levels))
    first = out.named(sites[term.smooth.kinds[0]])
    if term.smooth.kind == "gp":
        per_level = f"{first}[:, None]" if levels else first
        scale = f"{per_level} * {_shape(out, term.smooth, sites['lscale'])}"
        scale = f"({scale}).flatten()" if levels else scale
    else:
        scale = f"{first}.repeat_interleave({term.smooth.size})" if levels else first
    out.sample(term.name, f"dist.Normal(torch.zeros({len(term.columns)}), {scale}).to_event(1)")


def _shape(out: ProgramWriter, smooth: Smooth, site: str) -> str:
    """Write the relative sds of sines, and return their name."""
    length = out.named(site) + ("[:, None]" if smooth.levels else "")
    waves = f"{smooth.step:.9g} * torch.arange(1.0, {smooth.size + 1}.0)"
    unit = math.sqrt(2.0 * math.pi) / smooth.constants.boundary
    name = out.named(f"shape_{site.removeprefix('lscale_')}")
    out.add(
        f"{name} = ({unit:.9g} * {length} * torch.exp(-0.5 * ({length} * {waves}) ** 2) + {FLOOR:g}).sqrt()"
    )
    return name


def vector(out: ProgramWriter, terms: Sequence[DesignTerm], names: Sequence[str]) -> str:
    """Return the coefficients of some common columns as one vector, where some are those of curves."""
    pieces = []
    for term in terms:
        at = [place for place, name in enumerate(term.columns) if name in names]
        if at and not term.coords:
            pieces.append(f"{out.named(term.name)}[None]")
        elif at:
            every = len(at) == len(term.columns)
            pieces.append(out.named(term.name) + ("" if every else f"[{at}]"))
    return pieces[0] if len(pieces) == 1 else f"torch.cat([{', '.join(pieces)}])"


def write_spread(out: ProgramWriter, group: Any, priors: Mapping[str, Prior], outputs: int) -> str:
    """Write the length scales of a group; return the standard deviation of each column, as code."""
    check_one(group.group.text, outputs, "use bs(x, df=5)")
    scale, shapes = f"{out.named(group.sd)}[{list(group.places)}]", {}
    for site, term in group.lengths.items():
        assert term.smooth is not None
        out.sample(site, as_source(priors[site]))
        shapes[term.name] = _shape(out, term.smooth, site)
    if not shapes:
        return scale
    pieces = [
        shapes.get(name, f"torch.ones({group.places.count(place)})")
        for place, name in enumerate(group.entries)
    ]
    return f"{scale} * " + (pieces[0] if len(pieces) == 1 else f"torch.cat([{', '.join(pieces)}])")


def drawn_spread(group: Any, shared: Mapping[str, Tensor]) -> Tensor:
    """Return the standard deviation of each column of a group at each draw, (S, q)."""
    spread = shared[group.sd].reshape(len(shared[group.sd]), -1)[:, list(group.places)]
    for site, term in group.lengths.items():
        at = [group.columns.index(name) for name in term.columns]
        assert term.smooth is not None
        spread[:, at] = spread[:, at] * term.smooth.shape(shared[site])
    return spread
