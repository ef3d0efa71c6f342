"""Priors of a formula's sites: the user's, and weakly informative defaults for the others."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyro.distributions as dist
import torch
from torch.distributions import Distribution

from hierfl.formulas.declaration import Declaration, response_of
from hierfl.formulas.expressions import Call, Expression
from hierfl.formulas.grammar import Reader
from hierfl.formulas.layout import GroupTerm, Layout
from hierfl.formulas.schema import OFFSET, Schema
from hierfl.formulas.smooths import DesignTerm, length_prior, lengths_of, scale_priors
from hierfl.formulas.writer import INTERCEPT
from hierfl.models.families import Ordered, as_source, half_student, intercept_prior
from hierfl.models.priors import Prior, check_scale, is_distribution

Priors = Mapping[str, Prior]
# How many outcome spreads the change of one predictor by one sd may make: rstanarm's default.
SLOPE = 2.5


def all_priors(
    declared: Declaration, schema: Schema, layout: Layout, own: Priors
) -> dict[str, Prior]:
    """Return the prior of each site or column of a site; of "cor_..." an LKJ's concentration.

    Defaults, as brms has them where it has proper ones; other units of a column or of the response
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

    `own` are the user's: site, or column of a site, or "b", "sd" or "cor" for all such -> prior.
    """
    response = response_of(declared, schema)
    center, spread = declared.family.scale(response)
    if declared.family.link == "identity" and spread == 0.0:
        what = f"has one value, {response.mean:.6g}, in all rows, or nearly so: nothing to fit"
        raise ValueError(f"the response '{declared.parts.response}' {what}")
    has_unit = declared.family.kind == "real" and declared.family.link != "log"
    unit = spread if has_unit else 1.0
    priors: dict[str, Prior] = dict(declared.family.parameters(response))
    if OFFSET in schema.design:  # the intercept, or what takes its place, is what it leaves
        less = float(f"{center - schema.design[OFFSET].mean:.6g}")
        if declared.family.kind == "ordered":
            each_step = dist.StudentT(3.0, -less, 2.5)
            priors["thresholds"] = _of_each(each_step, priors["thresholds"])
        elif not declared.family.has_intercept:
            rate = replace(response, mean=response.mean * math.exp(center - less))
            priors |= declared.family.parameters(rate)
        center = less
    if layout.has_intercept:
        priors[INTERCEPT] = intercept_prior(center, spread, unit)
    step = spread if declared.family.link == "identity" else unit
    for name in layout.common.columns:
        margin = schema.design[name]
        ratio = step / (margin.sd or 1.0)  # 1: of a level without rows
        if not layout.common.has_intercept:  # the coefficients take up the center too
            ratio = math.hypot(center, step) / (math.hypot(margin.mean, margin.sd) or 1.0)
        priors[name] = dist.Normal(0.0, float(f"{SLOPE * ratio:.6g}"))
    for term in layout.common.terms:
        if term.by_step and len(response.levels) < 3:
            fix = f"write {', '.join(str(factor) for factor in term.factors)} without cs()"
            raise ValueError(f"'{term.name}' is for several thresholds, and one is there: {fix}")
        if term.monotone or term.smooth:
            priors = {name: prior for name, prior in priors.items() if name not in term.columns}
        if term.monotone:
            priors |= _of_steps(term, step, schema)
        if term.smooth:
            priors |= scale_priors(term, spread, unit)
    for group in layout.groups:
        priors.update(_of_group(group, schema, spread, unit))
    return _with_own(priors, layout, own) if own else priors


def _with_own(priors: Priors, layout: Layout, own: Priors) -> dict[str, Prior]:
    """Return priors with the user's in place of defaults; refuse names that the formula does not have."""
    terms = {term.name for term in layout.common.terms} | {g.sd for g in layout.groups}
    for name in priors:
        terms |= {*keys_of(name, layout)} - {"b", "sd", "cor"}
    _check_keys(own, {*priors, *terms})
    return {name: _chosen(name, prior, layout, own) for name, prior in priors.items()}


def _of_steps(term: DesignTerm, step: float, schema: Schema) -> dict[str, Prior]:
    """Return the priors of a monotonic effect: of the mean step of levels, and of their shares, by curve.

    The step of a curve is divided by the root mean square of its first column, which has the scale
    of what mo(x) is multiplied by.
    """
    size = len(term.steps)
    if size < 2:
        what = f"'{term.name}' has {size + 1} levels, of which no order is needed"
        raise ValueError(f"{what}: take C(x)")
    sd = math.sqrt(((size + 1) ** 2 - 1) / 12.0)  # of the levels' numbers, if all are as frequent
    priors: dict[str, Prior] = {}
    mean, shares = (term.of_curves(f"{kind}_{term.name}") for kind in ("b", "simplex"))
    for k, (site, share) in enumerate(zip(mean, shares, strict=True)):
        first = schema.design[term.columns[k * size]]
        scale = (math.hypot(first.mean, first.sd) or 1.0) if term.curves else 1.0
        priors[site] = dist.Normal(0.0, float(f"{SLOPE * step / (sd * scale):.6g}"))
        priors[share] = dist.Dirichlet(torch.ones(size))
    return priors


def _of_group(term: GroupTerm, schema: Schema, spread: float, unit: float) -> dict[str, Prior]:
    priors: dict[str, Prior] = {}
    for name in term.entries:
        is_curve = name not in term.columns
        plain = name == INTERCEPT or is_curve or name in term.design.coded
        size = 1.0 if plain else schema.design[name].sd or 1.0
        site = term.sd if term.is_single else f"{term.sd}[{name}]"
        priors[site] = half_student(float(f"{spread / size:.6g}"), float(f"{unit / size:.6g}"))
    if term.group.kind == "escar":
        priors[f"rho_{term.site}"] = dist.Beta(1.0, 1.0)
    if term.places:
        for site, curve_term in lengths_of(term).items():
            priors[site] = length_prior(curve_term.smooth)  # type: ignore[arg-type]
    return priors | ({term.cor: 1.0} if term.cor else {})


def is_of(name: str, site: str) -> bool:
    """Return whether a name is that of a site, or of one of its entries."""
    return name == site or name.startswith(f"{site}[")


def keys_of(name: str, layout: Layout) -> list[str]:
    """Return what a user may call a site or column, its own name first."""
    keys = [name]
    keys += [term.name for term in layout.common.terms if name in term.columns]
    if name in layout.common.columns:
        keys.append("b")
    for term in layout.common.terms:
        for kind, shared in (("b", [term.name, "b"]), ("simplex", [])) if term.monotone else ():
            site = f"{kind}_{term.name}"
            keys += [site, *shared] if name in term.of_curves(site) else []
        for kind in term.smooth.kinds if term.smooth else ():
            site = f"{kind}_{term.name}"
            keys += [site, kind] if is_of(name, site) else []
    for group in layout.groups:
        keys += [group.sd, "sd"] if is_of(name, group.sd) else []
        keys += ["cor"] if name == group.cor else []
        keys += ["lscale"] if name.startswith(f"lscale_{group.site}_") else []
        keys += ["rho"] if name == f"rho_{group.site}" else []
    return keys


def _chosen(name: str, default: Prior, layout: Layout, own: Priors) -> Prior:
    """Return the user's prior of a site or column, by its own name first, or the default."""
    keys = keys_of(name, layout)
    prior: Any = next((own[key] for key in keys if key in own), default)
    if isinstance(prior, str):
        prior = of_text(name, prior, default)
    if "cor" in keys:
        if isinstance(prior, Distribution) or not float(prior) > 0.0:
            fix = "give the concentration of an LKJ, a number > 0"
            raise ValueError(f"the prior of '{name}' is {prior}: {fix}")
        return float(prior)
    if not is_distribution(prior):
        fix = "give a distribution of Pyro, such as dist.Normal(0, 1), or 'normal(0, 1)'"
        raise TypeError(f"the prior of '{name}' is {prior!r}: {fix}")
    if name == "thresholds" and not prior.shape():
        prior = _of_each(prior, default)
    if not {"sd", "sds", "sdgp"}.isdisjoint(keys):
        check_scale(f"the prior of '{name}'", prior)
    _check_values(name, default, prior, [len(t.columns) for t in layout.common.terms])
    return prior


def _of_each(prior: Any, default: Any) -> Any:
    """Return the prior of all thresholds from that of one, as brms has it: in order where the default is."""
    if isinstance(default, Ordered):
        return Ordered(prior, default.size)
    return prior.expand(default.shape()).to_event(len(default.event_shape))


def _check_values(name: str, default: Any, prior: Any, sizes: Sequence[int]) -> None:
    """Refuse a prior of another shape, or of values that the site cannot have."""
    shape, usual, fault = tuple(prior.shape()), tuple(default.shape()), ""
    if shape != usual and not (len(shape) == 1 and shape[0] in sizes):
        fault = f"has shape {shape}: it must be {usual}"
    for value in () if fault else (-1.0, 2.0):
        at = torch.full(shape, value)
        if prior.support.check(at).any() and not default.support.check(at).all():
            fix = f"it must have the values of its default, {as_source(default)}"
            fault = f"is {prior}, which allows {value:g}: {fix}"
    if fault:
        raise ValueError(f"the prior of '{name}' {fault}")


def _check_keys(own: Priors, sites: set[str]) -> None:
    keys = {*sites, "b", "sd", "cor"}
    for key in own:
        fault = ""
        if key in ("b", "sd", "cor") and key in sites:
            fault = "which is a column and stands for many priors too: rename the column"
        elif key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            advice = f"did you mean '{near[0]}'? " if near else ""
            fault = f"which the formula does not have: {advice}it has {', '.join(sorted(keys))}"
        if fault:
            raise ValueError(f"priors has '{key}', {fault}")


# ------------------------------------------------------------ as brms and PreliZ write them
Builder = Callable[..., Any]
# Stan's word -> the number of its arguments, and the distribution.
WORDS: dict[str, tuple[int, Builder]] = {
    "normal": (2, dist.Normal),
    "student_t": (3, dist.StudentT),
    "cauchy": (2, dist.Cauchy),
    "double_exponential": (2, dist.Laplace),
    "logistic": (2, dist.Logistic),
    "exponential": (1, dist.Exponential),
    "gamma": (2, dist.Gamma),
    "inv_gamma": (2, dist.InverseGamma),
    "lognormal": (2, dist.LogNormal),
    "beta": (2, dist.Beta),
    "uniform": (2, dist.Uniform),
    "weibull": (2, lambda shape, scale: dist.Weibull(scale, shape)),
    "lkj": (1, float),
}
SYMMETRIC = ("normal", "student_t", "cauchy", "double_exponential", "logistic")
# PreliZ's class -> its parameters, and the distribution of them.
PRELIZ: dict[str, tuple[tuple[str, ...], Builder]] = {
    "Normal": (("mu", "sigma"), dist.Normal),
    "HalfNormal": (("sigma",), dist.HalfNormal),
    "StudentT": (("nu", "mu", "sigma"), dist.StudentT),
    "HalfStudentT": (
        ("nu", "sigma"),
        lambda nu, sigma: dist.FoldedDistribution(dist.StudentT(nu, 0.0, sigma)),
    ),
    "Cauchy": (("alpha", "beta"), dist.Cauchy),
    "HalfCauchy": (("beta",), dist.HalfCauchy),
    "Laplace": (("mu", "b"), dist.Laplace),
    "Logistic": (("mu", "s"), dist.Logistic),
    "Exponential": (("lam",), dist.Exponential),
    "Gamma": (("alpha", "beta"), dist.Gamma),
    "InverseGamma": (("alpha", "beta"), dist.InverseGamma),
    "LogNormal": (("mu", "sigma"), dist.LogNormal),
    "Beta": (("alpha", "beta"), dist.Beta),
    "Uniform": (("lower", "upper"), dist.Uniform),
    "Weibull": (("alpha", "beta"), lambda alpha, beta: dist.Weibull(beta, alpha)),
}


def as_given(name: str, prior: Any) -> Any:
    """Return a prior as it is kept: brms's words, checked, and PreliZ's objects as distributions."""
    if isinstance(prior, str):
        _parsed(name, prior)
    if type(prior).__module__.partition(".")[0] == "preliz":
        return _of_preliz(name, prior)
    return prior


def of_text(name: str, text: str, default: Prior) -> Any:
    """Return the distribution of brms's words; that of a scale about 0 is its upper half, as in brms."""
    word, values = _parsed(name, text)
    fn = WORDS[word][1](*values)
    if word not in SYMMETRIC or not _is_positive(default):
        return fn
    if values[-2] != 0.0:
        other = f"{word}({', '.join(f'{v:g}' for v in (*values[:-2], 0.0, values[-1]))})"
        fix = f"give one about 0, such as '{other}', or one of positive numbers, such as 'gamma(2, 0.1)'"
        what = f"the prior of '{name}' is '{text}', of which brms takes the part above 0"
        raise ValueError(f"{what}: {fix}")
    return dist.FoldedDistribution(fn)


def _is_positive(default: Any) -> bool:
    """Return whether a site has the values of its default prior above 0 alone."""
    if not hasattr(default, "support") or default.event_shape:
        return False
    return not bool(default.support.check(torch.full(tuple(default.shape()), -1.0)).any())


def _parsed(name: str, text: str) -> tuple[str, tuple[float, ...]]:
    """Return the word and the numbers of a prior, read to its last sign."""
    call: Expression = Call("")
    with suppress(ValueError):
        call = Reader(text, "prior").expression()
    word, numbers = call.callee, [argument.value for argument in call.args if argument.is_constant]
    values = tuple(float(number) for number in numbers if isinstance(number, int | float))
    count, fault = WORDS.get(word, (0,))[0], ""
    if not call.args or not word:
        fault = ": write it as in brms, such as 'normal(0, 1)'"
    elif word not in WORDS:
        near = difflib.get_close_matches(word, WORDS, 1)
        advice = f"did you mean '{near[0]}'? " if near else ""
        fault = f", which is not known: {advice}there are {', '.join(WORDS)}"
    elif len(values) < len(call.args) or call.options:
        fault = ": its arguments must be numbers"
    elif len(values) != count:
        fault = f": {word} has {count} argument{'s' * (count > 1)}, as in Stan"
    else:
        try:
            WORDS[word][1](*values)
        except ValueError as error:
            fault = f", which is none: {error}"
    if fault:
        raise ValueError(f"the prior of '{name}' is '{text}'{fault}")
    return word, values


def _of_preliz(name: str, prior: Any) -> Any:
    """Return the distribution of an object of PreliZ."""
    kind = type(prior).__name__
    names, builder = PRELIZ.get(kind, ((), None))
    values = [getattr(prior, parameter, None) for parameter in names]
    if builder is None or None in values:
        fix = f"without {', '.join(names)}: give it numbers, or fit it to an expert's answers first"
        if builder is None:
            fix = f"which is not read: give one of {', '.join(PRELIZ)}, or a distribution of Pyro"
        raise ValueError(f"the prior of '{name}' is PreliZ's {kind}, {fix}")
    return builder(*(float(str(value)) for value in values))
