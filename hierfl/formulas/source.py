"""The Pyro program that a formula stands for, as text. The text is what runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hierfl.formulas.declaration import Declaration, additions_of, response_of
from hierfl.formulas.expressions import DesignTerm
from hierfl.formulas.imputed import stepped, write_imputed
from hierfl.formulas.layout import GroupTerm, Layout, rows_of_above
from hierfl.formulas.schema import Schema
from hierfl.formulas.smooths import vector, write_smooth, write_spread
from hierfl.formulas.structures import write_structure
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
    write_origin,
    write_thresholds,
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
    declared, schema, priors = formula.declared, formula.agreed, formula.all_priors
    out, parameters = ProgramWriter(), [*formula.parameters.values()]
    for own in parameters:
        suffixes = (own.layout.suffix, f"_by{own.layout.suffix}")
        out.taken = {*out.taken, *(f"{word}{end}" for word in TAKEN for end in suffixes)}
    outputs = declared.family.outputs(response_of(declared, schema))
    response = PredictorLines(out, declared, schema, formula.layout, priors, outputs)
    of_parameters = [
        PredictorLines(out, own.declared, schema, own.layout, priors) for own in parameters
    ]
    for section in (response, *of_parameters):
        section.global_sites()
        section.base()
    out.add("with batch.clients():")
    out.indent = 2
    for section in (response, *of_parameters):
        for term in section.layout.at("clients"):
            section.own(term)
        for term in section.layout.at("within"):  # as many groups as the largest client has
            out.sample(term.site, section.deviations(term))
    out.add("with batch.data():")
    out.indent = 3
    response.predictor()
    for own, section in zip(parameters, of_parameters, strict=True):
        section.predictor()
        if not own.is_covariate:
            out.add(f"{out.named(own.name)} = eta{own.layout.suffix}{own.inverse}")
    if "weights" in declared.parts.additions:
        out.add("with pyro.poutine.scale(scale=batch.weights):")
        out.indent = 4
    out.add(f"pyro.sample({declared.parts.response!r}, {response.likelihood()}, obs=batch.y)")
    return HEAD.format(title=_title(declared, schema)) + "\n".join(out.lines) + "\n"


def _title(declared: Declaration, schema: Schema) -> str:
    text = f"{declared.text}, family {declared.family.name}({declared.family.link})"
    levels = schema.columns[declared.parts.labels[0]].levels
    if declared.family.kind == "binary" and levels:
        text += f"; 1 is {''.join(c if c.isprintable() else '?' for c in levels[1])}"
    return text.replace("\\", "\\\\").replace('"', "'")


@dataclass(frozen=True)
class PredictorLines:
    """Writes the lines of a linear predictor: of the response, which has `outputs`, a parameter or a covariate."""

    out: ProgramWriter
    declared: Declaration
    schema: Schema
    layout: Layout
    priors: Mapping[str, Prior]
    outputs: int = 1

    # -------------------------------------------------------- sites outside the clients plate
    def global_sites(self) -> None:
        """Write the sites outside the clients plate."""
        out, layout, priors = self.out, self.layout, self.priors
        response = response_of(self.declared, self.schema)
        wide = f".expand([{self.outputs}]).to_event(1)" if self.outputs > 1 else ""
        if layout.has_intercept:
            note = AT_MEANS if layout.means else ""
            prior = as_source(priors[layout.intercept]) + wide
            out.sample(layout.sampled_intercept, prior, note=note)
        for term in layout.common.terms:
            if term.monotone or term.smooth:
                self._steps(term)
                continue
            width = len(response.levels) - 1 if term.by_step else self.outputs
            shape = ([len(term.columns)] if term.coords else []) + ([width] if width > 1 else [])
            names = [f"{layout.prefix}{name}" for name in term.columns]
            prior = independent(priors, names, shape)
            out.sample(term.name, prior, note=", ".join(term.coords))
        for group in layout.groups:
            self._scales(group)
        # parameters without a prior here have terms of their own
        for name in filter(priors.__contains__, self.declared.family.parameters(response)):
            prior_of: Any = priors[name]
            dims = len(getattr(prior_of, "batch_shape", ()))
            moved = name == THRESHOLDS and layout.threshold_means
            site, note = (f"{name}{CENTERED}", AT_MEANS) if moved else (name, "")
            out.sample(site, as_source(prior_of.to_event(dims) if dims else prior_of), note=note)
        for group in (*layout.at("above"), *layout.at("crossed")):
            if not group.group.kind:
                some = ", ".join(group.levels[:4]) + (", ..." if len(group.levels) > 4 else "")
                out.sample(group.site, self.deviations(group), note=some)

    def _steps(self, term: DesignTerm) -> None:
        """Write a monotonic effect, the mean step of levels, the shares of each and their products; or a smooth."""
        if term.smooth:
            return write_smooth(self.out, term, self.priors, self.outputs)
        check_one(term.name, self.outputs, "take C(x)")
        out, mean, shares = self.out, f"b_{term.name}", f"simplex_{term.name}"
        many, of = [len(term.curves)] if term.curves else [], ", ".join(term.curves)
        note = "mean step between levels" + (f", of {of}" if of else "")
        out.sample(mean, independent(self.priors, term.of_curves(mean), many), note=note)
        prior = independent(self.priors, term.of_curves(shares), many)
        out.sample(shares, prior, note=", ".join(term.steps))
        product = f"{len(term.steps)} * {out.named(mean)}[..., None] * {out.named(shares)}"
        product = f"({product}).flatten(-2)" if many else product
        out.add(f"{out.named(term.name)} = pyro.deterministic({term.name!r}, {product})")

    def _scales(self, group: GroupTerm) -> None:
        """Write the standard deviations and correlations of one term with a bar, and groups that are neighbors."""
        out, priors, outputs = self.out, self.priors, self.outputs
        size = len(group.entries) * outputs
        names = [group.sd] if group.is_single else [f"{group.sd}[{c}]" for c in group.entries]
        shape = [] if size == 1 and group.is_single else [size]
        entry_names = names if outputs == 1 else [name for name in names for _ in range(outputs)]
        note = "" if group.is_single else ", ".join(group.entries)
        if outputs == 1 and (means := means_of(group, self.schema)):
            return write_moved(out, group, priors, means)
        out.sample(group.sd, independent(priors, entry_names, shape), note=note)
        out.scales[group.site] = out.named(group.sd)
        if group.places:
            out.scales[group.site] = write_spread(out, group, priors, outputs)
        if group.group.kind:
            write_structure(out, group, self.schema, priors, outputs)
        if group.cor:
            out.sample(group.cholesky, f"dist.LKJCholesky({size}, {float(priors[group.cor])})")
            lower = out.named(group.cholesky)
            out.add(f"pyro.deterministic({group.cor!r}, {lower} @ {lower}.mT)")

    def deviations(self, group: GroupTerm) -> str:
        """Return the distribution of groups' deviations from zero, one row per group."""
        scale, count = self.out.scales[group.site], int(group.size)
        size = len(group.columns) * self.outputs
        if group.cor:
            lower = f"{scale}[:, None] * {self.out.named(group.cholesky)}"
            normal = f"dist.MultivariateNormal(torch.zeros({size}), scale_tril={lower})"
            return f"{normal}.expand([{count}]).to_event(1)"
        if group.is_single and self.outputs == 1:
            return f"dist.Normal(torch.zeros({count}), {scale}).to_event(1)"
        return f"dist.Normal(torch.zeros({count}, {size}), {scale}).to_event(2)"

    # -------------------------------------------------------- means of own sites
    def _column(self, name: str) -> str:
        """Return the coefficient of one common column as an expression."""
        term = next(term for term in self.layout.common.terms if name in term.columns)
        at = f"[{term.columns.index(name)}]" if term.coords else ""
        return self.out.named(term.name) + at

    def _vector(self, names: Sequence[str]) -> str:
        """Return the coefficients of some common columns as one vector, (P,) or (P, outputs)."""
        for term in self.layout.common.terms:
            if term.coords and tuple(names) == term.columns:
                return self.out.named(term.name)
        if self.layout.common.is_smooth:
            return vector(self.out, self.layout.common.terms, names)
        return f"torch.stack([{', '.join(map(self._column, names))}])"

    def base(self) -> None:
        """Write the predictor of a row whose columns are all zero, which is the intercept as it is reported."""
        out, layout, end = self.out, self.layout, self.layout.suffix
        start = out.named(layout.sampled_intercept) if layout.has_intercept else ""
        if layout.read:
            out.add(f"read{end} = {self._vector(layout.read)}")
        if layout.threshold_means:
            write_origin(out, layout, self._vector)
        if not layout.means:
            out.add(f"base{end} = {start or 'torch.zeros(())'}")
            return
        means = ", ".join(f"{mean:.9g}" for mean in layout.means.values())
        out.add(f"means{end} = torch.tensor([{means}])")
        names = tuple(layout.means)
        slopes = f"read{end}" if names == layout.read else self._vector(names)
        wide = "means[:, None]" if self.outputs > 1 else f"means{end}"
        out.add(f"base{end} = {start + ' ' if start else ''}- ({wide} * {slopes}).sum(0)")
        if layout.has_intercept:  # where all predictors are 0
            out.add(f"pyro.deterministic({layout.intercept!r}, base{end})")

    def own(self, term: GroupTerm) -> None:
        """Write one local site: the client's own coefficients."""
        out, means = self.out, [self._mean(term, name) for name in term.columns]
        scale = out.scales[term.site]
        if term.is_single and self.outputs == 1:
            out.sample(term.site, f"dist.Normal({means[0]}, {scale})")
            return
        if self.outputs == 1:
            out.add(f"loc = torch.stack(torch.broadcast_tensors({', '.join(means)}), -1)")
        else:
            wide = [f"{mean} + torch.zeros({self.outputs})" for mean in means]
            out.add(f"loc = torch.cat(torch.broadcast_tensors({', '.join(wide)}), -1)")
        normal = f"dist.Normal(loc, {scale}).to_event(1)"
        if term.cor:
            lower = f"{scale}[:, None] * {out.named(term.cholesky)}"
            normal = f"dist.MultivariateNormal(loc, scale_tril={lower})"
        out.sample(term.site, normal)

    def _mean(self, term: GroupTerm, name: str) -> str:
        """Return the mean of one own coefficient: the common one, and what lies above the client."""
        if self.layout.own.get(name) is not term:
            return "torch.zeros(())"
        means, outputs = list[str](), self.outputs
        if name == INTERCEPT:
            means.append(f"base{self.layout.suffix}")
        elif name in self.layout.common.columns:
            means.append(self._column(name))
        for group in self.layout.at("above"):
            if name in group.columns:
                place = group.columns.index(name)
                several = f"[..., {place * outputs}:{(place + 1) * outputs}]"
                at = several if outputs > 1 else "" if group.is_single else f"[..., {place}]"
                means.append(f"{self.out.named(group.site)}[batch.{group.index}]{at}")
        return " + ".join(means) or "torch.zeros(())"

    # -------------------------------------------------------- the predictor
    def predictor(self) -> None:
        """Write the predictor of each row."""
        layout, end, is_wide = self.layout, self.layout.suffix, self.outputs > 1
        summands = [] if INTERCEPT in layout.own else [f"base{end}"]
        if layout.common.offsets:
            summands.append("batch.offset[..., None]" if is_wide else "batch.offset")
        if layout.read:
            summands.append(self._product(f"batch.x{end}", f"read{end}"))
        for term in layout.at("clients"):
            own = self.out.named(term.site)
            if is_wide and not term.is_single:
                own = f"{own}.unflatten(-1, ({len(term.columns)}, {self.outputs}))"
            summands.append(own if term.is_single else self._product(f"batch.{term.field}", own))
        for term in (*layout.at("above"), *layout.at("crossed"), *layout.at("within")):
            if term.place != "above" or rows_of_above(layout, term):
                summands.append(self._of_groups(term))
        self.out.add(f"eta{end} = {' + '.join(summands)}")
        if layout.steps:
            write_thresholds(self.out, self._vector(layout.steps))

    def _product(self, rows: str, coefficients: str) -> str:
        if self.outputs > 1:
            return f"({rows}[..., None] * {coefficients}).sum(-2)"
        return f"({rows} * {coefficients}).sum(-1)"

    def _of_groups(self, term: GroupTerm) -> str:
        """Return what the groups of a term add to the predictor of each row."""
        value, index = self.out.named(term.site), f"batch.{term.index}"
        taken = f"{value}[{index}]"
        if term.place == "within":
            is_scalar = term.is_single and self.outputs == 1
            at, dim = (index, -1) if is_scalar else (f"{index}[..., None]", -2)
            taken = f"torch.take_along_dim({value}.squeeze(1), {at}, {dim})"
        if term.is_single:
            return taken
        if self.outputs > 1:
            taken = f"{taken}.unflatten(-1, ({len(term.columns)}, {self.outputs}))"
        return self._product(f"batch.{term.field}", taken)

    def likelihood(self) -> str:
        """Return the distribution of a row as code, whose parameters have their Python names."""
        declared, out = self.declared, self.out
        likelihood = declared.family.expression(additions_of(declared))
        if declared.imputed:
            for covariate in declared.imputed:
                step = stepped(self.layout, covariate)
                if step.read:
                    out.add(f"read{step.suffix} = read")
                replace(self, layout=step, outputs=1).predictor()
            likelihood = write_imputed(out, declared, likelihood)
        for site in declared.family.parameters(response_of(declared, self.schema)):
            if (name := out.named(site)) != site:
                likelihood = re.sub(rf"(?<![\w.]){re.escape(site)}(?!\w|=)", name, likelihood)
        return likelihood
