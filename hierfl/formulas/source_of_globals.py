"""The lines of a formula's program outside the clients plate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyro.distributions as dist
import torch

from hierfl.formulas.declaration import Declaration, response_of
from hierfl.formulas.layout import INTERCEPT, GroupTerm, Layout
from hierfl.formulas.schema import Schema
from hierfl.formulas.writer import Writer
from hierfl.models.families import as_source
from hierfl.models.priors import Prior


def global_sites(
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
        out.sample(term.name, _joined(priors, term.columns, shape), note=", ".join(term.coords))
    for group in found.groups:
        _group_sites(out, group, priors, outputs)
    for name in of_family:
        prior: Any = priors[name]
        dims = len(getattr(prior, "batch_shape", ()))
        out.sample(name, as_source(prior.to_event(dims) if dims else prior))
    for group in (*found.at("above"), *found.at("crossed")):
        scale, cor = out.named(group.sd), group.cor and out.named(group.cholesky)
        out.sample(group.site, deviations(group, scale, cor, outputs), note=_few(group.levels))


def _few(levels: Sequence[str]) -> str:
    shown = ", ".join(levels[:4])
    return f"{shown}, ..." if len(levels) > 4 else shown


def _group_sites(out: Writer, group: GroupTerm, priors: Mapping[str, Prior], outputs: int) -> None:
    """Write the standard deviations and correlations of one term with a bar."""
    size = len(group.columns) * outputs
    names = [group.sd] if group.is_single else [f"{group.sd}[{c}]" for c in group.columns]
    shape = [] if size == 1 and group.is_single else [size]
    each = [name for name in names for _ in range(outputs)]
    note = "" if group.is_single else ", ".join(group.columns)
    out.sample(group.sd, _joined(priors, each, shape), note=note)
    if group.cor:
        out.sample(group.cholesky, f"dist.LKJCholesky({size}, {float(priors[group.cor])})")
        lower = out.named(group.cholesky)
        out.add(f"pyro.deterministic({group.cor!r}, {lower} @ {lower}.mT)")


def _joined(priors: Mapping[str, Prior], names: Sequence[str], shape: list[int]) -> str:
    """Return some independent priors as one event, whose first dimension runs over them."""
    texts = [as_source(priors[name]) for name in names]
    if not shape:
        return texts[0]
    if len(set(texts)) == 1:
        return f"{texts[0]}.expand({shape}).to_event({len(shape)})"
    each = [priors[name] for name in names]
    return as_source(_of_kind(each, shape).to_event(len(shape)))


def _of_kind(priors: Sequence[Any], shape: list[int]) -> Any:
    """Return priors of one kind as a batch of a shape whose first dimension runs over them."""
    kind = type(priors[0])
    if any(type(prior) is not kind for prior in priors):
        texts = sorted({as_source(prior) for prior in priors})
        raise ValueError(
            f"the columns of one term have the priors {', '.join(texts)}: give them priors of one "
            "kind"
        )
    if kind is dist.FoldedDistribution:
        return kind(_of_kind([prior.base_dist for prior in priors], shape))
    values = {
        name: torch.stack([torch.as_tensor(getattr(prior, name)) for prior in priors])
        for name in kind.arg_constraints
    }
    wide = {n: v[:, None].expand(shape) if len(shape) > 1 else v for n, v in values.items()}
    return kind(**wide)


def deviations(group: GroupTerm, scale: str, cor: str | None, outputs: int) -> str:
    """Return the distribution of groups' deviations from zero, one row per group."""
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
