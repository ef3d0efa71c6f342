"""The Pyro program that a formula stands for, as text. The text is what runs."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hierfl.formulas.declaration import Declaration
from hierfl.formulas.layout import INTERCEPT, GroupTerm, Layout
from hierfl.formulas.priors import response_of
from hierfl.formulas.schema import Schema
from hierfl.models.families import as_source
from hierfl.models.priors import Prior

HEAD = """import pyro
import pyro.distributions as dist
import torch

import hierfl
from hierfl.models import families


@hierfl.model
def {name}(batch):
    \"\"\"{title}\"\"\"
"""
# Names that the program has already.
TAKEN = {
    *(
        "pyro",
        "dist",
        "torch",
        "hierfl",
        "families",
        "batch",
        "eta",
        "loc",
        "base",
        "own",
        "read",
        "above",
    ),
    *keyword.kwlist,
}


@dataclass
class Writer:
    """Lines of a program, and the Python names of its sites.

    Args:
        lines: so far.
        names: site -> the name of its value.
        indent: of the next line.
    """

    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    indent: int = 1

    def add(self, line: str) -> None:
        """Add one line."""
        self.lines.append("    " * self.indent + line)

    def sample(self, site: str, distribution: str, *, note: str = "") -> None:
        """Add the line that draws a site."""
        name = self.named(site)
        self.add(
            f"{name} = pyro.sample({site!r}, {distribution})" + (f"  # {note}" if note else "")
        )

    def named(self, site: str) -> str:
        """Return the Python name of a site, one that no other has."""
        if site not in self.names:
            plain = re.sub(r"\W+", "_", site, flags=re.ASCII).strip("_").lower() or "site"
            plain = f"b_{plain}" if plain[0].isdigit() or plain in TAKEN else plain
            taken, name, i = set(self.names.values()), plain, 2
            while name in taken:
                name, i = f"{plain}_{i}", i + 1
            self.names[site] = name
        return self.names[site]


def source(
    declared: Declaration, schema: Schema, found: Layout, priors: Mapping[str, Prior], name: str
) -> str:
    """Return the program of a formula.

    Args:
        declared: the formula.
        schema: that clients agree on.
        found: the formula's layout.
        priors: of each site, from `hierfl.formulas.priors.all_priors`.
        name: of the function.
    """
    outputs = declared.family.outputs(response_of(declared, schema))
    out = Writer()
    _global_sites(out, declared, schema, found, priors, outputs)
    _base(out, schema, found, outputs)
    out.add("with batch.clients():")
    out.indent = 2
    for term in found.at("clients"):
        _own(out, found, term, outputs)
    for term in found.at("within"):
        _within(out, term, outputs)
    out.add("with batch.data():")
    out.indent = 3
    _predictor(out, found, outputs)
    if "weights" in declared.parts.additions:
        out.add("with pyro.poutine.scale(scale=batch.weights):")
        out.indent = 4
    present = additions_of(declared)
    parameters = {
        n: out.named(n) for n in declared.family.parameters(response_of(declared, schema))
    }
    likelihood = _renamed(declared.family.expression(present), parameters)
    out.add(f"pyro.sample({declared.parts.response!r}, {likelihood}, obs=batch.y)")
    head = HEAD.format(name=name, title=_title(declared))
    return head + "\n".join(out.lines) + "\n"


def _title(declared: Declaration) -> str:
    text = f"{declared.text}, family {declared.family.name}({declared.family.link})"
    return text.replace("\\", "\\\\").replace('"', "'")


def additions_of(declared: Declaration) -> tuple[str, ...]:
    """Return the additions that the likelihood reads: event() is the code of cens()."""
    given = {"cens" if name == "event" else name for name in declared.parts.additions}
    return tuple(sorted(given - {"weights"}))


def _renamed(expression: str, names: Mapping[str, str]) -> str:
    for site, name in names.items():
        if site != name:
            expression = re.sub(rf"(?<![\w.]){re.escape(site)}(?!\w|=)", name, expression)
    return expression


# ------------------------------------------------------------------------------------------ global sites
def _global_sites(
    out: Writer,
    declared: Declaration,
    schema: Schema,
    found: Layout,
    priors: Mapping[str, Prior],
    outputs: int,
) -> None:
    """Write the sites outside the clients plate."""
    of_family = declared.family.parameters(response_of(declared, schema))
    wide = f".expand([{outputs}]).to_event(1)" if outputs > 1 else ""
    if found.has_intercept:
        at = "at the means of the predictors" if found.common.columns else ""
        out.sample(INTERCEPT, as_source(priors[INTERCEPT]) + wide, note=at)
    for term in found.common.terms:
        shape = ([len(term.columns)] if term.coords else []) + ([outputs] if outputs > 1 else [])
        out.sample(
            term.name,
            _joined([priors[c] for c in term.columns], shape),
            note=", ".join(term.coords),
        )
    for group in found.groups:
        _group_sites(out, group, priors, outputs)
    for name in of_family:
        out.sample(name, as_source(_event(priors[name])))
    for group in (*found.at("above"), *found.at("crossed")):
        scale, cor = out.named(group.sd), group.cor and out.named(group.cholesky)
        out.sample(group.site, _deviations(group, scale, cor, outputs), note=_few(group.levels))


def _event(prior: Prior) -> Prior:
    """Return a prior whose entries are one event."""
    shape = getattr(prior, "batch_shape", ())
    return prior.to_event(len(shape)) if len(shape) else prior  # type: ignore[union-attr]


def _few(levels: Sequence[str]) -> str:
    shown = ", ".join(levels[:4])
    return f"{shown}, ..." if len(levels) > 4 else shown


def _group_sites(out: Writer, group: GroupTerm, priors: Mapping[str, Prior], outputs: int) -> None:
    """Write the standard deviations and correlations of one term with a bar."""
    size = len(group.columns) * outputs
    names = [group.sd] if group.is_single else [f"{group.sd}[{c}]" for c in group.columns]
    shape = [] if size == 1 and group.is_single else [size]
    each = [priors[name] for name in names for _ in range(outputs)]
    note = "" if group.is_single else ", ".join(group.columns)
    out.sample(group.sd, _joined(each, shape), note=note)
    if group.cor:
        out.sample(group.cholesky, f"dist.LKJCholesky({size}, {float(priors[group.cor])})")
        lower = out.named(group.cholesky)
        out.add(f"pyro.deterministic({group.cor!r}, {lower} @ {lower}.mT)")


def _joined(priors: Sequence[Prior], shape: list[int]) -> str:
    """Return independent priors as one event of a shape, in which the first dimension runs over them."""
    texts = [as_source(prior) for prior in priors]
    if not shape:
        return texts[0]
    if len(set(texts)) == 1:
        return f"{texts[0]}.expand({shape}).to_event({len(shape)})"
    kind = type(priors[0])
    if any(type(prior) is not kind for prior in priors) or kind.__name__ == "FoldedDistribution":
        raise ValueError(
            f"the columns of one term have the priors {', '.join(sorted(set(texts)))}: give them priors of one kind"
        )
    values = {
        name: torch.stack([torch.as_tensor(getattr(prior, name)) for prior in priors])
        for name in kind.arg_constraints  # type: ignore[union-attr]
    }
    wide = {n: v[:, None].expand(shape) if len(shape) > 1 else v for n, v in values.items()}
    return as_source(kind(**wide).to_event(len(shape)))  # type: ignore[union-attr]


def _deviations(group: GroupTerm, scale: str, cor: str | None, outputs: int) -> str:
    """Return the distribution of groups' deviations from zero, one row a group."""
    size = len(group.columns) * outputs
    single = group.is_single and outputs == 1
    if cor:
        normal = (
            f"dist.MultivariateNormal(torch.zeros({size}), scale_tril={scale}[:, None] * {cor})"
        )
        return f"{normal}.expand([{group.size}]).to_event(1)"
    zeros = f"torch.zeros({group.size})" if single else f"torch.zeros({group.size}, {size})"
    return f"dist.Normal({zeros}, {scale}).to_event({1 if single else 2})"


# ------------------------------------------------------------------------------------------ means of own sites
def _column(out: Writer, found: Layout, name: str) -> str:
    """Return the coefficient of one common column as an expression."""
    term = next(term for term in found.common.terms if name in term.columns)
    at = f"[{term.columns.index(name)}]" if term.coords else ""
    return out.named(term.name) + at


def _stacked(parts: Sequence[str]) -> str:
    return f"torch.stack([{', '.join(parts)}])"


def _vector(out: Writer, found: Layout, names: Sequence[str]) -> str:
    """Return the coefficients of some common columns as one vector, (P,) or (P, outputs)."""
    whole = next((t for t in found.common.terms if t.coords and tuple(names) == t.columns), None)
    return out.named(whole.name) if whole else _stacked([_column(out, found, n) for n in names])


def _base(out: Writer, schema: Schema, found: Layout, outputs: int) -> None:
    """Write the predictor of a row whose columns are all zero."""
    start = out.named(INTERCEPT) if found.has_intercept else ""
    names = [n for n in found.common.columns if schema.design[n].mean != 0.0]
    if not found.is_centred or not names:
        out.add(f"base = {start or 'torch.zeros(())'}")
        return
    means = ", ".join(f"{schema.design[n].mean:.9g}" for n in names)
    product = f"(torch.tensor([{means}]){'[:, None]' if outputs > 1 else ''} * {_vector(out, found, names)}).sum(0)"
    out.add(
        f"base = {start} - {product}  # where all predictors are 0"
        if start
        else f"base = -{product}"
    )


def _own(out: Writer, found: Layout, term: GroupTerm, outputs: int) -> None:
    """Write one local site: the client's own coefficients."""
    means = [_mean(out, found, term, name, outputs) for name in term.columns]
    scale, cor = out.named(term.sd), term.cor and out.named(term.cholesky)
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


def _mean(out: Writer, found: Layout, term: GroupTerm, name: str, outputs: int) -> str:
    """Return the mean of one own coefficient: the common one, and what lies above the client."""
    if found.own.get(name) is not term:
        return "torch.zeros(())"
    parts = []
    if name == INTERCEPT:
        parts.append("base")
    elif name in found.common.columns:
        parts.append(_column(out, found, name))
    if name == INTERCEPT and found.above:
        parts.append(_product("batch.above", _vector(out, found, found.above), outputs))
    for group in found.at("above"):
        if name in group.columns:
            place = group.columns.index(name)
            several = f"[..., {place * outputs}:{(place + 1) * outputs}]"
            at = several if outputs > 1 else "" if group.is_single else f"[..., {place}]"
            parts.append(f"{out.named(group.site)}[batch.{index_of(group)}]{at}")
    return " + ".join(parts) or "torch.zeros(())"


def _within(out: Writer, term: GroupTerm, outputs: int) -> None:
    """Write the deviations of the groups inside a client, as many as the client with the most of them has."""
    scale, cor = out.named(term.sd), term.cor and out.named(term.cholesky)
    out.sample(term.site, _deviations(term, scale, cor, outputs))


# ------------------------------------------------------------------------------------------ the predictor
def index_of(term: GroupTerm) -> str:
    """Return the field with the number of each row's, or each client's, group."""
    return "g_" + re.sub(r"\W+", "_", term.group.name, flags=re.ASCII)


def columns_field(term: GroupTerm) -> str:
    """Return the field with a term's columns at each row."""
    return "z_" + re.sub(r"\W+", "_", term.site, flags=re.ASCII)


def rows_of_above(found: Layout, term: GroupTerm) -> tuple[str, ...]:
    """Return the columns of a term above the clients that no own coefficient takes up."""
    return tuple(name for name in term.columns if name not in found.own)


def _predictor(out: Writer, found: Layout, outputs: int) -> None:
    parts = [] if INTERCEPT in found.own else ["base"]
    if found.common.offsets:
        parts.append("batch.offset[..., None]" if outputs > 1 else "batch.offset")
    if found.read:
        parts.append(_product("batch.x", _vector(out, found, found.read), outputs))
    for term in found.at("clients"):
        own = out.named(term.site)
        if term.is_single:
            parts.append(own)
        elif outputs > 1:
            shaped = f"{own}.unflatten(-1, ({len(term.columns)}, {outputs}))"
            parts.append(_product(f"batch.{columns_field(term)}", shaped, outputs))
        else:
            parts.append(_product(f"batch.{columns_field(term)}", own, outputs))
    for term in (*found.at("above"), *found.at("crossed"), *found.at("within")):
        if term.place == "above" and not rows_of_above(found, term):
            continue
        parts.append(_of_groups(out, found, term, outputs))
    out.add(f"eta = {' + '.join(parts)}")


def _product(rows: str, coefficients: str, outputs: int) -> str:
    if outputs > 1:
        return f"({rows}[..., None] * {coefficients}).sum(-2)"
    return f"({rows} * {coefficients}).sum(-1)"


def _of_groups(out: Writer, found: Layout, term: GroupTerm, outputs: int) -> str:
    """Return what the groups of a term add to the predictor of each row."""
    value, index = out.named(term.site), f"batch.{index_of(term)}"
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
    return _product(f"batch.{columns_field(term)}", taken, outputs)
