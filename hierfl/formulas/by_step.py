"""Category-specific effects, cs(x): coefficients that move each threshold of an ordinal family."""

from __future__ import annotations

from hierfl.formulas.layout import Layout, Writer
from hierfl.formulas.schema import Schema


def write_thresholds(out: Writer, schema: Schema, layout: Layout, vector: str) -> None:
    """Write the thresholds of each row, moved by its columns of cs() times coefficients, a `vector`."""
    rows = "batch.steps"
    if layout.common.has_intercept:
        means = ", ".join(f"{schema.design[name].mean:.9g}" for name in layout.steps)
        rows = f"(batch.steps - torch.tensor([{means}]))"
    moves = f"({rows}[..., None] * {vector}).sum(-2)"
    before = out.named("thresholds")
    out.names["thresholds"] = "thresholds_of_rows"
    out.add(f"thresholds_of_rows = {before} - {moves}")
