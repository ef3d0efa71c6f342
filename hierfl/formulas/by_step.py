"""Thresholds of ordinal families, at 0 of all columns; and category-specific effects, cs(x), that move each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hierfl.formulas.layout import CENTERED, THRESHOLDS, Layout, Writer

Vector = Callable[[Sequence[str]], str]  # names of columns -> their coefficients as code


def write_origin(out: Writer, found: Layout, vector: Vector) -> None:
    """Write the thresholds at 0, as they are reported, from those at the columns' means."""
    moved, means = out.named(f"{THRESHOLDS}{CENTERED}"), found.threshold_means
    plain = [name for name in means if name not in found.steps]
    by_step = [name for name in means if name in found.steps]
    for names, wide in ((plain, ""), (by_step, "[:, None]")):
        if names:
            values = ", ".join(f"{means[name]:.9g}" for name in names)
            moved += f" + (torch.tensor([{values}]){wide} * {vector(names)}).sum(0)"
    out.add(f"{out.named(THRESHOLDS)} = pyro.deterministic({THRESHOLDS!r}, {moved})")


def write_thresholds(out: Writer, vector: str) -> None:
    """Write the thresholds of each row, moved by its columns of cs() times coefficients, a `vector`."""
    moves = f"(batch.steps[..., None] * {vector}).sum(-2)"
    before = out.named(THRESHOLDS)
    out.names[THRESHOLDS] = "thresholds_of_rows"
    out.add(f"thresholds_of_rows = {before} - {moves}")
