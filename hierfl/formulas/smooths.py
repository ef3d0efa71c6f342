"""Smooth terms, `s(x)` and `gp(x)`: their sites, priors and scales, in the common terms and of groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.formulas.curves import LONG, SHORT
from hierfl.formulas.transforms import SMOOTHS, Constants
from hierfl.models.families import as_source, half_student
from hierfl.models.priors import Prior

if TYPE_CHECKING:
    from hierfl.formulas.columns import Column
    from hierfl.formulas.design import Design, Term
    from hierfl.formulas.layout import GroupTerm, Writer
    from hierfl.formulas.syntax import Group

FLOOR = 1e-8  # of a sine's share of the variance: short waves keep a density
TAIL = 0.01  # prior probability beyond each end of the length scales that sines can have


@dataclass(frozen=True)
class Smooth:
    """What shares a scale: `size` coefficients for each of the `levels` of `by`, or of one curve, ()."""

    kind: str
    size: int
    levels: tuple[str, ...]
    constants: Constants

    @property
    def kinds(self) -> tuple[str, ...]:
        """What its scales are called: brms's names."""
        return ("sds",) if self.kind == "s" else ("sdgp", "lscale")

    @property
    def step(self) -> float:
        """The frequency of the first sine."""
        return math.pi / (2.0 * self.constants.boundary)

    def shape(self, length: Tensor) -> Tensor:
        """Return the sds of sines (..., k) relative to that of the process, at length scales (...).

        Of exp(-(x - x')^2 / (2 length^2)), Riutort-Mayol et al. 2023, Statistics and Computing
        33:17, equations 9 and 13, with sines in place of sines / sqrt(L).
        """
        waves = self.step * torch.arange(1, self.size + 1, dtype=length.dtype)
        unit = math.sqrt(2.0 * math.pi) / self.constants.boundary
        part = unit * length[..., None] * torch.exp(-0.5 * (length[..., None] * waves) ** 2)
        return (part + FLOOR).sqrt()


def named_smooth(
    name: str, term: Any, width: int, columns: Mapping[str, Column]
) -> tuple[Term, ...]:
    """Return the terms of a smooth of `width` columns, lines first; () of a column called like one."""
    from hierfl.formulas.design import Term

    call: Any = getattr(term.components[0], "call", None)
    if getattr(call, "callee", "") not in SMOOTHS:
        return ()
    constants: Constants = call.stateful_transform.func
    is_spline = call.callee == "s"
    size = len(constants.knots) - 2 if is_spline else constants.degree
    by = getattr(call.kwargs.get("by"), "name", "")
    levels = columns[by].levels if by else ()
    parts = frozenset((type(component), component.name) for component in term.components)
    numbers = tuple(map(str, range(1, size + 1)))
    coords = tuple(f"{level}:{n}" for level in levels for n in numbers) or numbers
    smooth = Smooth(call.callee, size, levels, constants)
    curves = Term(name, _labels(name, coords), coords, parts, smooth=smooth)
    if not is_spline:
        return (curves,)
    line = f"linear_{name}"
    coords = levels or ((by, f"{by}:{call.args[0]}") if by else ())
    return Term(line, _labels(line, coords) or (line,), coords, parts), curves


def check_constants(terms: Sequence[Term]) -> None:
    """Refuse a column beside a smooth by that column, of which it is a part already."""
    every = {column for term in terms for column in term.columns}
    for line, curves in pairwise(terms):
        if curves.smooth and curves.smooth.kind == "s" and not curves.smooth.levels:
            for name in {*line.coords[:1]} & every:
                raise ValueError(
                    f"'{curves.name}' holds the effect of '{name}' already, as in mgcv: take the term "
                    f"'{name}' out"
                )


def _labels(name: str, coords: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name}[{label}]" for label in coords)


def sites_of(term: Term) -> dict[str, str]:
    """Return the sites of a term's scales: "sds" -> "sds_s(x)"; none of other terms."""
    return {kind: f"{kind}_{term.name}" for kind in term.smooth.kinds} if term.smooth else {}


# ------------------------------------------------------------ priors
def scale_priors(term: Term, spread: float, unit: float) -> dict[str, Prior]:
    """Return the priors of a common smooth's scales, by level."""
    assert term.smooth is not None
    found: dict[str, Prior] = {}
    for kind, site in sites_of(term).items():
        prior = length_prior(term.smooth) if kind == "lscale" else half_student(spread, unit)
        found |= dict.fromkeys(_labels(site, term.smooth.levels) or (site,), prior)
    return found


def length_prior(smooth: Smooth) -> dist.InverseGamma:
    """Return the prior of a length scale: 1 % below the shortest that sines can have, 1 % above the longest.

    As brms, which takes the distances of the data for the two ends.
    """
    half = (smooth.constants.knots[1] - smooth.constants.knots[0]) / 2.0
    boundary = smooth.constants.boundary
    shape, rate = _inverse_gamma(
        SHORT * boundary / smooth.size / half, LONG * (boundary / half - 1.0)
    )
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


# ------------------------------------------------------------ the program
def write_smooth(out: Writer, term: Term, priors: Mapping[str, Prior], outputs: int) -> None:
    """Write the scales of a common smooth, and its coefficients."""
    from hierfl.formulas.source import independent

    assert term.smooth is not None
    check_one(term.name, outputs)
    levels, sites = term.smooth.levels, sites_of(term)
    for site in sites.values():
        shape = [len(levels)] if levels else []
        names = _labels(site, levels) or (site,)
        out.sample(site, independent(priors, names, shape), note=", ".join(levels))
    first = out.named(sites[term.smooth.kinds[0]])
    if term.smooth.kind == "gp":
        each = f"{first}[:, None]" if levels else first
        scale = f"{each} * {_shape(out, term.smooth, sites['lscale'])}"
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
    parts = []
    for term in terms:
        at = [place for place, name in enumerate(term.columns) if name in names]
        if at and not term.coords:
            parts.append(f"{out.named(term.name)}[None]")
        elif at:
            every = len(at) == len(term.columns)
            parts.append(out.named(term.name) + ("" if every else f"[{at}]"))
    return parts[0] if len(parts) == 1 else f"torch.cat([{', '.join(parts)}])"


# ------------------------------------------------------------ groups
def entries_of(
    group: Group, design: Design, columns: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return what has a standard deviation of its own in a group, and the place of each column's."""
    owner = {c: t.name for t in design.terms if t.smooth for c in t.columns}
    if group.correlated:
        raise ValueError(
            f"the term '{group.text}' has '{next(iter(owner.values()))}', which has no correlations: "
            f"write ({group.terms} || {group.name})"
        )
    if lost := [t.name for t in design.terms if t.smooth and "by=" in t.name]:
        raise ValueError(
            f"the term '{group.text}' has '{lost[0]}': leave by= out, or let it stand alone"
        )
    names = [owner.get(column, column) for column in columns]
    entries = tuple(dict.fromkeys(names))
    return entries, tuple(map(entries.index, names))


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
    each, shapes = f"{out.named(group.sd)}[{list(group.places)}]", {}
    for site, term in lengths_of(group).items():
        assert term.smooth is not None
        out.sample(site, as_source(priors[site]))
        shapes[term.name] = _shape(out, term.smooth, site)
    if not shapes:
        return each
    parts = [
        shapes.get(name, f"torch.ones({group.places.count(place)})")
        for place, name in enumerate(group.entries)
    ]
    return f"{each} * " + (parts[0] if len(parts) == 1 else f"torch.cat([{', '.join(parts)}])")


def drawn_spread(group: GroupTerm, shared: Mapping[str, Tensor]) -> Tensor:
    """Return the standard deviation of each column of a group at each draw, (S, q)."""
    found = shared[group.sd].reshape(len(shared[group.sd]), -1)[:, list(group.places)]
    for site, term in lengths_of(group).items():
        at = [group.columns.index(name) for name in term.columns]
        assert term.smooth is not None
        found[:, at] = found[:, at] * term.smooth.shape(shared[site])
    return found
