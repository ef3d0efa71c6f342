"""Category-specific effects, cs(x): coefficients that move each threshold of an ordinal family."""

from __future__ import annotations

from dataclasses import replace

from hierfl.formulas.layout import Layout, Writer
from hierfl.formulas.schema import Schema
from hierfl.formulas.source import vector_of


def with_steps(found: Layout) -> Layout:
    """Return a layout whose columns of cs() move thresholds, and not the predictor."""
    steps = {name for term in found.common.terms if term.by_step for name in term.columns}

    def without(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in steps)

    whole = tuple(name for name in found.common.columns if name in steps)
    return replace(found, above=without(found.above), read=without(found.read), steps=whole)


def write_thresholds(out: Writer, schema: Schema, found: Layout) -> None:
    """Write the thresholds of each row, moved by its columns of cs()."""
    rows = "batch.steps"
    if found.is_centered:
        means = ", ".join(f"{schema.design[name].mean:.9g}" for name in found.steps)
        rows = f"(batch.steps - torch.tensor([{means}]))"
    moves = f"({rows}[..., None] * {vector_of(out, found, found.steps)}).sum(-2)"
    before = out.named("thresholds")
    out.names["thresholds"] = "thresholds_of_rows"
    out.add(f"thresholds_of_rows = {before} - {moves}")
