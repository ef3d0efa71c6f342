"""Priors of a formula's sites: the user's, and weakly informative defaults for the others."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch.distributions import Distribution

from hierfl.core.arguments import did_you_mean
from hierfl.formulas.declaration import Declaration, response_of
from hierfl.formulas.expressions import DesignTerm
from hierfl.formulas.layout import GroupTerm, Layout
from hierfl.formulas.prior_texts import of_text
from hierfl.formulas.schema import OFFSET, Schema
from hierfl.formulas.smooths import labels, length_prior
from hierfl.formulas.writer import INTERCEPT
from hierfl.models.families import Ordered, Response, as_source, half_student, intercept_prior
from hierfl.models.priors import Prior, check_scale, is_distribution

Priors = Mapping[str, Prior]
# How many outcome spreads the change of one predictor by one sd may make: rstanarm's default.
SLOPE = 2.5


class SitePrior(NamedTuple):
    """The prior of a site or of one of its columns, of correlations the concentration of an LKJ.

    `kind` is "b", "sd", "cor", "sds", "sdgp", "lscale", "rho" or ""; `names` are what a user may call it
    beside its own name: its term, its site or, of the response's terms, its kind. `is_own`: it is the user's.
    """

    prior: Prior
    kind: str = ""
    names: tuple[str, ...] = ()
    is_own: bool = False


SitePriors = dict[str, SitePrior]


def default_priors(declared: Declaration, schema: Schema, layout: Layout) -> SitePriors:
    """Return the default prior of each site or column of a site.

    They are as brms has them where it has proper ones; other units of a column or of the response
    change their units alone:

    * `Intercept`: StudentT(3, center, max(2.5, spread)), at the means of the predictors; center and
      spread are those of the response on the scale of the linear predictor; 2.5 spread where the
      predictor has the response's unit.
    * a common coefficient: Normal(0, 2.5 / sd of its column), times the spread where the link is
      the identity: rstanarm's; brms has a flat one. Without an intercept the root mean squares of
      the column and of the response take the places of the sds.
    * standard deviations of groups: half-StudentT(3, 0, s), s as of the intercept; of slopes of
      numbers s / sd of the column. Where intercept and slopes are correlated, that of the
      intercept is at the numbers' means.
    * correlations: LKJ(1).
    * rho of neighbors: Beta(1, 1), brms's.
    * smooths: as standard deviations of groups; length scales as `smooths.length_prior`.
    * parameters of the family: `ResponseFamily.parameters`.
    """
    response = response_of(declared, schema)
    center, spread = declared.family.scale(response)
    if declared.family.link == "identity" and spread == 0.0:
        what = f"has one value, {response.mean:.6g}, in all rows, or nearly so: nothing to fit"
        raise ValueError(f"the response '{declared.parts.response}' {what}")
    has_unit = declared.family.kind == "real" and declared.family.link != "log"
    unit = spread if has_unit else 1.0
    of_family: dict[str, Prior] = dict(declared.family.parameters(response))
    if OFFSET in schema.design and not layout.prefix:  # the response's intercept is what it leaves
        less = float(f"{center - schema.design[OFFSET].mean:.6g}")
        of_family |= _with_offset(declared, response, center, less)
        center = less
    priors = {name: SitePrior(prior) for name, prior in of_family.items()}
    if layout.has_intercept:
        priors[layout.intercept] = SitePrior(intercept_prior(center, spread, unit))
    step = spread if declared.family.link == "identity" else unit
    for term in layout.common.terms:
        for name in () if term.monotone or term.smooth else term.columns:
            margin = schema.design[name]
            ratio = step / (margin.sd or 1.0)  # 1: of a level without rows
            if not layout.common.has_intercept:  # the coefficients take up the center too
                ratio = math.hypot(center, step) / (math.hypot(margin.mean, margin.sd) or 1.0)
            prior = dist.Normal(0.0, float(f"{SLOPE * ratio:.6g}"))
            priors[f"{layout.prefix}{name}"] = _named(layout, prior, "b", term.name)
    for term in layout.common.terms:
        if term.by_step and len(response.levels) < 3:
            fix = f"write {', '.join(str(factor) for factor in term.factors)} without cs()"
            what = f"'{term.name}' is for several thresholds, and there is only one"
            raise ValueError(f"{what}: {fix}")
        if term.monotone:
            priors |= _of_steps(term, step, schema, layout)
        priors |= _of_smooth(term, layout, spread, unit)
    for group in layout.groups:
        priors |= _of_group(group, schema, layout, spread, unit)
    return priors


def _with_offset(
    declared: Declaration, response: Response, center: float, less: float
) -> dict[str, Prior]:
    """Return the priors of a family's parameters in the intercept's place, at a center `less` an offset."""
    if declared.family.kind == "ordered":
        each_step = dist.StudentT(3.0, -less, 2.5)
        default = declared.family.parameters(response)["thresholds"]
        return {"thresholds": _of_each(each_step, default)}
    if declared.family.has_intercept:
        return {}
    rate = replace(response, mean=response.mean * math.exp(center - less))
    return dict(declared.family.parameters(rate))


def _named(layout: Layout, prior: Prior, kind: str, *names: str) -> SitePrior:
    """Return a prior of a kind, by which those of the response's terms may be called."""
    return SitePrior(prior, kind, names if layout.prefix else (*names, kind))


def _of_steps(term: DesignTerm, step: float, schema: Schema, layout: Layout) -> SitePriors:
    """Return priors of a monotonic effect by curve: of the mean step, per rms of its first column, and of shares."""
    size = len(term.steps)
    if size < 2:
        what = f"'{term.name}' has {size + 1} levels, which need no order"
        raise ValueError(f"{what}: use C(x)")
    sd = math.sqrt(((size + 1) ** 2 - 1) / 12.0)  # of the levels' numbers, if all are as frequent
    priors: SitePriors = {}
    b, simplex = (f"{kind}_{term.name}" for kind in ("b", "simplex"))
    pairs = zip(term.of_curves(b), term.of_curves(simplex), strict=True)
    for k, (site, share) in enumerate(pairs):
        first = schema.design[term.columns[k * size]]
        scale = (math.hypot(first.mean, first.sd) or 1.0) if term.curves else 1.0
        normal = dist.Normal(0.0, float(f"{SLOPE * step / (sd * scale):.6g}"))
        priors[site] = _named(layout, normal, "b", b, term.name)
        priors[share] = SitePrior(dist.Dirichlet(torch.ones(size)), "", (simplex,))
    return priors


def _of_smooth(term: DesignTerm, layout: Layout, spread: float, unit: float) -> SitePriors:
    """Return the priors of a smooth's scales, by level."""
    priors: SitePriors = {}
    for kind, site in term.scale_sites.items():
        assert term.smooth is not None
        is_length = kind == "lscale"
        prior = length_prior(term.smooth) if is_length else half_student(spread, unit)
        sites = labels(site, term.smooth.levels) or (site,)
        priors |= dict.fromkeys(sites, _named(layout, prior, kind, site))
    return priors


def _of_group(
    term: GroupTerm, schema: Schema, layout: Layout, spread: float, unit: float
) -> SitePriors:
    priors: SitePriors = {}
    for name in term.entries:
        is_curve = name not in term.columns
        plain = name == INTERCEPT or is_curve or name in term.design.coded
        size = 1.0 if plain else schema.design[name].sd or 1.0
        site = term.sd if term.is_single else f"{term.sd}[{name}]"
        scale = half_student(float(f"{spread / size:.6g}"), float(f"{unit / size:.6g}"))
        priors[site] = _named(layout, scale, "sd", term.sd)
    if term.group.kind == "escar":
        priors[f"rho_{term.site}"] = _named(layout, dist.Beta(1.0, 1.0), "rho")
    if term.places:
        for site, curve in term.lengths.items():
            assert curve.smooth is not None
            priors[site] = _named(layout, length_prior(curve.smooth), "lscale")
    return priors | ({term.cor: _named(layout, 1.0, "cor")} if term.cor else {})


def site_priors(formula: Any) -> SitePriors:
    """Return the priors of all sites, a parameter's with its prefix; the user's first name that fits replaces one."""
    declared, schema, own = formula.declared, formula.agreed, formula.priors
    priors = default_priors(declared, schema, formula.layout)
    for name, parameter in formula.parameters.items():
        if priors.pop(name, None) and name in own:
            fix = f"give priors of its sites, such as '{name}_{INTERCEPT}'"
            raise ValueError(f"priors has '{name}', which has terms of its own: {fix}")
        priors |= default_priors(parameter.declared, schema, parameter.layout)
    if not own:
        return priors
    _check_keys(own, priors)
    sizes = [len(term.columns) for layout in formula.layouts for term in layout.common.terms]
    return {name: _chosen(name, default, own, sizes) for name, default in priors.items()}


def _chosen(name: str, default: SitePrior, own: Priors, sizes: Sequence[int]) -> SitePrior:
    """Return the user's prior of a site or column, by its own name first, or the default."""
    key = next((key for key in (name, *default.names) if key in own), None)
    if key is None:
        return default
    prior: Any = own[key]
    if isinstance(prior, str):
        prior = of_text(name, prior, default.prior)
    if default.kind == "cor":
        if isinstance(prior, Distribution) or not float(prior) > 0.0:
            fix = "give the concentration of an LKJ, a number > 0"
            raise ValueError(f"the prior of '{name}' is {prior}: {fix}")
        return default._replace(prior=float(prior), is_own=True)
    if not is_distribution(prior):
        fix = "give a distribution of Pyro, such as dist.Normal(0, 1), or 'normal(0, 1)'"
        raise TypeError(f"the prior of '{name}' is {prior!r}: {fix}")
    if name == "thresholds" and not prior.shape():
        prior = _of_each(prior, default.prior)
    if default.kind in ("sd", "sds", "sdgp"):
        check_scale(f"the prior of '{name}'", prior)
    _check_values(name, default.prior, prior, sizes)
    return default._replace(prior=prior, is_own=True)


def _of_each(prior: Any, default: Any) -> Any:
    """Return the prior of all thresholds from that of one, as brms has it: in order where the default is."""
    if isinstance(default, Ordered):
        return Ordered(prior, default.size)
    return prior.expand(default.shape()).to_event(len(default.event_shape))


def _check_values(name: str, default: Any, prior: Any, sizes: Sequence[int]) -> None:
    """Refuse a prior of another shape, or of values that the site cannot have."""
    shape, usual = tuple(prior.shape()), tuple(default.shape())
    if shape != usual and not (len(shape) == 1 and shape[0] in sizes):
        raise ValueError(f"the prior of '{name}' has shape {shape}: it must be {usual}")
    for value in (2.0, -1.0):
        at = torch.full(shape, value)
        if prior.support.check(at).any() and not default.support.check(at).all():
            fix = f"it must have the values of its default, {as_source(default)}"
            raise ValueError(f"the prior of '{name}' is {prior}, which allows {value:g}: {fix}")


def _check_keys(own: Priors, priors: SitePriors) -> None:
    kinds = {"b", "sd", "cor"}
    names = {*priors, *kinds, *chain.from_iterable(of.names for of in priors.values())}
    for key in own:
        if key in kinds and key in priors:
            what = "which is a column, and also stands for a group of priors"
            raise ValueError(f"priors has '{key}', {what}: rename the column")
        if key not in names:
            fix = did_you_mean(key, names, f"it has {', '.join(sorted(names))}")
            raise ValueError(f"priors has '{key}', which the formula does not have: {fix}")
