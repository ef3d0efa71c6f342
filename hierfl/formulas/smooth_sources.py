"""Smooth terms in the program: their scales and coefficients, in the common terms and of groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from hierfl.formulas.design_terms import FLOOR, Smooth, Term
from hierfl.formulas.layout import GroupTerm, Writer, independent
from hierfl.formulas.smooths import labels, sites_of
from hierfl.models.families import as_source
from hierfl.models.priors import Prior


# ------------------------------------------------------------ the program
def write_smooth(out: Writer, term: Term, priors: Mapping[str, Prior], outputs: int) -> None:
    """Write the scales of a common smooth, and its coefficients."""
    assert term.smooth is not None
    check_one(term.name, outputs)
    levels, sites = term.smooth.levels, sites_of(term)
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


def check_one(name: str, outputs: int) -> None:
    """Refuse a smooth in several predictors."""
    if outputs > 1:
        raise ValueError(
            f"'{name}' is for one predictor, and the response has {outputs}: take bs(x, df=5)"
        )


def _shape(out: Writer, smooth: Smooth, site: str) -> str:
    """Write the relative sds of sines, and return their name."""
    length = out.named(site) + ("[:, None]" if smooth.levels else "")
    waves = f"{smooth.step:.9g} * torch.arange(1.0, {smooth.size + 1}.0)"
    unit = math.sqrt(2.0 * math.pi) / smooth.constants.boundary
    name = out.named(f"shape_{site.removeprefix('lscale_')}")
    out.add(
        f"{name} = ({unit:.9g} * {length} * torch.exp(-0.5 * ({length} * {waves}) ** 2) + {FLOOR:g})"
        ".sqrt()"
    )
    return name


def vector(out: Writer, terms: Sequence[Term], names: Sequence[str]) -> str:
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


# ------------------------------------------------------------ groups
def lengths_of(group: GroupTerm) -> dict[str, Term]:
    """Return the site of the length scale of each `gp` of a group, and its term."""
    return {
        f"lscale_{group.site}_{term.name}": term
        for term in group.design.terms
        if term.smooth and term.smooth.kind == "gp"
    }


def write_spread(out: Writer, group: GroupTerm, priors: Mapping[str, Prior], outputs: int) -> str:
    """Write the length scales of a group; return the standard deviation of each column, as code."""
    check_one(group.group.text, outputs)
    scale, shapes = f"{out.named(group.sd)}[{list(group.places)}]", {}
    for site, term in lengths_of(group).items():
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


def drawn_spread(group: GroupTerm, shared: Mapping[str, Tensor]) -> Tensor:
    """Return the standard deviation of each column of a group at each draw, (S, q)."""
    spread = shared[group.sd].reshape(len(shared[group.sd]), -1)[:, list(group.places)]
    for site, term in lengths_of(group).items():
        at = [group.columns.index(name) for name in term.columns]
        assert term.smooth is not None
        spread[:, at] = spread[:, at] * term.smooth.shape(shared[site])
    return spread
