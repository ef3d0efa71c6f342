"""The Pyro program that a formula stands for, as text. The text is what runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hierfl.formulas.declaration import Declaration, response_of
from hierfl.formulas.design_terms import DesignTerm
from hierfl.formulas.layout import GroupTerm, Layout, rows_of_above
from hierfl.formulas.schema import Schema
from hierfl.formulas.writer import (
    AT_MEANS,
    CENTERED,
    INTERCEPT,
    TAKEN,
    THRESHOLDS,
    ProgramWriter,
    check_one,
    independent,
    means_of,
    write_moved,
)
from hierfl.models.families import as_source
from hierfl.models.priors import Prior

HEAD = """import pyro
import pyro.distributions as dist
import torch

import hierfl
from hierfl.models import families


@hierfl.model
def model(batch):
    \"\"\"{title}\"\"\"
"""


def source(formula: Any) -> str:
    """Return the program of a formula, as a function called `model`."""
    declared, schema, layout = formula.declared, formula.agreed, formula.layout
    outputs = declared.family.outputs(response_of(declared, schema))
    out, priors, parameters = ProgramWriter(), formula.all_priors, [*formula.parameters.values()]
    for own in parameters:
        suffixes = (own.layout.suffix, f"_by{own.layout.suffix}")
        out.taken = {*out.taken, *(f"{word}{end}" for word in TAKEN for end in suffixes)}
    _global_sites(out, declared, schema, layout, priors, outputs)
    _base(out, layout, outputs)
    for own in parameters:
        _global_sites(out, own.declared, schema, own.layout, own.own(priors), 1)
        _base(out, own.layout, 1)
    out.add("with batch.clients():")
    out.indent = 2
    for some in formula.layouts:
        wide = outputs if some is layout else 1
        for term in some.at("clients"):
            _own(out, some, term, wide)
        for term in some.at("within"):  # as many groups as the largest client has
            out.sample(term.site, _deviations(out, term, wide))
    out.add("with batch.data():")
    out.indent = 3
    _predictor(out, schema, layout, outputs)
    for own in parameters:
        _predictor(out, schema, own.layout, 1)
        if not own.is_covariate:
            out.add(f"{out.named(own.name)} = eta{own.layout.suffix}{own.inverse}")
    if "weights" in declared.parts.additions:
        out.add("with pyro.poutine.scale(scale=batch.weights):")
        out.indent = 4
    likelihood = _likelihood(out, formula)
    out.add(f"pyro.sample({declared.parts.response!r}, {likelihood}, obs=batch.y)")
    return HEAD.format(title=_title(declared, schema)) + "\n".join(out.lines) + "\n"


def _likelihood(out: ProgramWriter, formula: Any) -> str:
    """Return the distribution of a row as code, whose parameters have their Python names."""
    declared, schema = formula.declared, formula.agreed
    likelihood = declared.family.expression(additions_of(declared))
    if declared.imputed:
        from hierfl.formulas.imputed import stepped, write_imputed

        for covariate in declared.imputed:
            step = stepped(formula.layout, covariate)
            if step.read:
                out.add(f"read{step.suffix} = read")
            _predictor(out, schema, step, 1)
        likelihood = write_imputed(out, declared, likelihood)
    for site in declared.family.parameters(response_of(declared, schema)):
        if (name := out.named(site)) != site:
            likelihood = re.sub(rf"(?<![\w.]){re.escape(site)}(?!\w|=)", name, likelihood)
    return likelihood


def _title(declared: Declaration, schema: Schema) -> str:
    text = f"{declared.text}, family {declared.family.name}({declared.family.link})"
    levels = schema.columns[declared.parts.labels[0]].levels
    if declared.family.kind == "binary" and levels:
        text += f"; 1 is {''.join(c if c.isprintable() else '?' for c in levels[1])}"
    return text.replace("\\", "\\\\").replace('"', "'")


def additions_of(declared: Declaration) -> tuple[str, ...]:
    """Return the additions that the likelihood reads: event() is the code of cens()."""
    additions = set(declared.parts.additions)
    codes = {"cens"} if "event" in additions else set()
    return tuple(sorted((additions | codes) - {"event", "weights"}))


# ------------------------------------------------------------ sites outside the clients plate
def _global_sites(
    out: ProgramWriter,
    declared: Declaration,
    schema: Schema,
    layout: Layout,
    priors: Mapping[str, Prior],
    outputs: int,
) -> None:
    """Write the sites outside the clients plate."""
    of_family = declared.family.parameters(response_of(declared, schema))
    wide = f".expand([{outputs}]).to_event(1)" if outputs > 1 else ""
    if layout.has_intercept:
        note = AT_MEANS if layout.means else ""
        out.sample(layout.sampled_intercept, as_source(priors[INTERCEPT]) + wide, note=note)
    for term in layout.common.terms:
        if term.monotone or term.smooth:
            _steps(out, term, priors, outputs)
            continue
        width = len(response_of(declared, schema).levels) - 1 if term.by_step else outputs
        shape = ([len(term.columns)] if term.coords else []) + ([width] if width > 1 else [])
        out.sample(term.name, independent(priors, term.columns, shape), note=", ".join(term.coords))
    for group in layout.groups:
        _group_sites(out, group, schema, priors, outputs)
    for name in filter(priors.__contains__, of_family):  # the others have terms of their own
        prior: Any = priors[name]
        dims = len(getattr(prior, "batch_shape", ()))
        moved = name == THRESHOLDS and layout.threshold_means
        site, note = (f"{name}{CENTERED}", AT_MEANS) if moved else (name, "")
        out.sample(site, as_source(prior.to_event(dims) if dims else prior), note=note)
    for group in (*layout.at("above"), *layout.at("crossed")):
        if group.group.kind:
            continue
        some = ", ".join(group.levels[:4]) + (", ..." if len(group.levels) > 4 else "")
        out.sample(group.site, _deviations(out, group, outputs), note=some)


def _steps(out: ProgramWriter, term: DesignTerm, priors: Mapping[str, Prior], outputs: int) -> None:
    """Write a monotonic effect, the mean step of levels, the shares of each and their products; or a smooth."""
    if term.smooth:
        from hierfl.formulas.smooths import write_smooth

        return write_smooth(out, term, priors, outputs)
    check_one(term.name, outputs, "take C(x)")
    mean, shares = f"b_{term.name}", f"simplex_{term.name}"
    many, of = [len(term.curves)] if term.curves else [], ", ".join(term.curves)
    note = "mean step between levels" + (f", of {of}" if of else "")
    out.sample(mean, independent(priors, term.of_curves(mean), many), note=note)
    out.sample(
        shares, independent(priors, term.of_curves(shares), many), note=", ".join(term.steps)
    )
    product = f"{len(term.steps)} * {out.named(mean)}[..., None] * {out.named(shares)}"
    product = f"({product}).flatten(-2)" if many else product
    out.add(f"{out.named(term.name)} = pyro.deterministic({term.name!r}, {product})")


def _group_sites(
    out: ProgramWriter, group: GroupTerm, schema: Schema, priors: Mapping[str, Prior], outputs: int
) -> None:
    """Write the standard deviations and correlations of one term with a bar, and groups that are neighbors."""
    size = len(group.entries) * outputs
    names = [group.sd] if group.is_single else [f"{group.sd}[{c}]" for c in group.entries]
    shape = [] if size == 1 and group.is_single else [size]
    entry_names = names if outputs == 1 else [name for name in names for _ in range(outputs)]
    note = "" if group.is_single else ", ".join(group.entries)
    if outputs == 1 and (means := means_of(group, schema)):
        return write_moved(out, group, priors, means)
    out.sample(group.sd, independent(priors, entry_names, shape), note=note)
    out.scales[group.site] = out.named(group.sd)
    if group.places:
        from hierfl.formulas.smooths import write_spread

        out.scales[group.site] = write_spread(out, group, priors, outputs)
    if group.group.kind:
        from hierfl.formulas.structures import write_structure

        write_structure(out, group, schema, priors, outputs)
    if group.cor:
        out.sample(group.cholesky, f"dist.LKJCholesky({size}, {float(priors[group.cor])})")
        lower = out.named(group.cholesky)
        out.add(f"pyro.deterministic({group.cor!r}, {lower} @ {lower}.mT)")


def _deviations(out: ProgramWriter, group: GroupTerm, outputs: int) -> str:
    """Return the distribution of groups' deviations from zero, one row per group."""
    scale, cor = out.scales[group.site], group.cor and out.named(group.cholesky)
    size = len(group.columns) * outputs
    single = group.is_single and outputs == 1
    if cor:
        normal = (
            f"dist.MultivariateNormal(torch.zeros({size}), scale_tril={scale}[:, None] * {cor})"
        )
        return f"{normal}.expand([{int(group.size)}]).to_event(1)"
    zeros = (
        f"torch.zeros({int(group.size)})" if single else f"torch.zeros({int(group.size)}, {size})"
    )
    return f"dist.Normal({zeros}, {scale}).to_event({1 if single else 2})"


# ------------------------------------------------------------ means of own sites
def _column(out: ProgramWriter, layout: Layout, name: str) -> str:
    """Return the coefficient of one common column as an expression."""
    for term in layout.common.terms:
        if name in term.columns:
            at = f"[{term.columns.index(name)}]" if term.coords else ""
            return out.named(term.name) + at
    raise KeyError(name)


def vector_of(out: ProgramWriter, layout: Layout, names: Sequence[str]) -> str:
    """Return the coefficients of some common columns as one vector, (P,) or (P, outputs)."""
    for term in layout.common.terms:
        if term.coords and tuple(names) == term.columns:
            return out.named(term.name)
    if layout.common.is_smooth:
        from hierfl.formulas.smooths import vector

        return vector(out, layout.common.terms, names)
    return f"torch.stack([{', '.join([_column(out, layout, name) for name in names])}])"


def _base(out: ProgramWriter, layout: Layout, outputs: int) -> None:
    """Write the predictor of a row whose columns are all zero, which is the intercept as it is reported."""
    start = out.named(layout.sampled_intercept) if layout.has_intercept else ""
    if layout.read:
        out.add(f"read{layout.suffix} = {vector_of(out, layout, layout.read)}")
    if layout.threshold_means:
        from hierfl.formulas.writer import write_origin

        write_origin(out, layout, partial(vector_of, out, layout))
    if not layout.means:
        out.add(f"base{layout.suffix} = {start or 'torch.zeros(())'}")
        return
    means = ", ".join(f"{mean:.9g}" for mean in layout.means.values())
    out.add(f"means{layout.suffix} = torch.tensor([{means}])")
    names = tuple(layout.means)
    slopes = f"read{layout.suffix}" if names == layout.read else vector_of(out, layout, names)
    wide = "means[:, None]" if outputs > 1 else f"means{layout.suffix}"
    out.add(f"base{layout.suffix} = {start + ' ' if start else ''}- ({wide} * {slopes}).sum(0)")
    if layout.has_intercept:  # where all predictors are 0
        out.add(f"pyro.deterministic({layout.intercept!r}, base{layout.suffix})")


def _own(out: ProgramWriter, layout: Layout, term: GroupTerm, outputs: int) -> None:
    """Write one local site: the client's own coefficients."""
    means = [_mean(out, layout, term, name, outputs) for name in term.columns]
    scale, cor = out.scales[term.site], term.cor and out.named(term.cholesky)
    if term.is_single and outputs == 1:
        out.sample(term.site, f"dist.Normal({means[0]}, {scale})")
        return
    if outputs == 1:
        out.add(f"loc = torch.stack(torch.broadcast_tensors({', '.join(means)}), -1)")
    else:
        wide = [f"{mean} + torch.zeros({outputs})" for mean in means]
        out.add(f"loc = torch.cat(torch.broadcast_tensors({', '.join(wide)}), -1)")
    if cor:
        out.sample(term.site, f"dist.MultivariateNormal(loc, scale_tril={scale}[:, None] * {cor})")
    else:
        out.sample(term.site, f"dist.Normal(loc, {scale}).to_event(1)")


def _mean(out: ProgramWriter, layout: Layout, term: GroupTerm, name: str, outputs: int) -> str:
    """Return the mean of one own coefficient: the common one, and what lies above the client."""
    if layout.own.get(name) is not term:
        return "torch.zeros(())"
    means = []
    if name == INTERCEPT:
        means.append(f"base{layout.suffix}")
    elif name in layout.common.columns:
        means.append(_column(out, layout, name))
    for group in layout.at("above"):
        if name in group.columns:
            place = group.columns.index(name)
            several = f"[..., {place * outputs}:{(place + 1) * outputs}]"
            at = several if outputs > 1 else "" if group.is_single else f"[..., {place}]"
            means.append(f"{out.named(group.site)}[batch.{group.index}]{at}")
    return " + ".join(means) or "torch.zeros(())"


# ------------------------------------------------------------ the predictor
def _predictor(out: ProgramWriter, schema: Schema, layout: Layout, outputs: int) -> None:
    summands = [] if INTERCEPT in layout.own else [f"base{layout.suffix}"]
    if layout.common.offsets:
        summands.append("batch.offset[..., None]" if outputs > 1 else "batch.offset")
    if layout.read:
        summands.append(_product(f"batch.x{layout.suffix}", f"read{layout.suffix}", outputs))
    for term in layout.at("clients"):
        own = out.named(term.site)
        if term.is_single:
            summands.append(own)
        elif outputs > 1:
            shaped = f"{own}.unflatten(-1, ({len(term.columns)}, {outputs}))"
            summands.append(_product(f"batch.{term.field}", shaped, outputs))
        else:
            summands.append(_product(f"batch.{term.field}", own, outputs))
    for term in (*layout.at("above"), *layout.at("crossed"), *layout.at("within")):
        if term.place == "above" and not rows_of_above(layout, term):
            continue
        summands.append(_of_groups(out, layout, term, outputs))
    out.add(f"eta{layout.suffix} = {' + '.join(summands)}")
    if layout.steps:
        from hierfl.formulas.writer import write_thresholds

        write_thresholds(out, vector_of(out, layout, layout.steps))


def _product(rows: str, coefficients: str, outputs: int) -> str:
    if outputs > 1:
        return f"({rows}[..., None] * {coefficients}).sum(-2)"
    return f"({rows} * {coefficients}).sum(-1)"


def _of_groups(out: ProgramWriter, layout: Layout, term: GroupTerm, outputs: int) -> str:
    """Return what the groups of a term add to the predictor of each row."""
    value, index = out.named(term.site), f"batch.{term.index}"
    if term.place == "within":
        at = index if term.is_single and outputs == 1 else f"{index}[..., None]"
        dim = -1 if term.is_single and outputs == 1 else -2
        taken = f"torch.take_along_dim({value}.squeeze(1), {at}, {dim})"
    else:
        taken = f"{value}[{index}]"
    if term.is_single:
        return taken
    if outputs > 1:
        taken = f"{taken}.unflatten(-1, ({len(term.columns)}, {outputs}))"
    return _product(f"batch.{term.field}", taken, outputs)
