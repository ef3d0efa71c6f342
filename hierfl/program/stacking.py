"""Local params of N clients along the clients plate of a pooled program."""

from __future__ import annotations

from torch import Tensor

from hierfl.program.program import Params, Program


def stacked(program: Program, rows: Params) -> Params:
    """Return local params (N, *shape) as a program with N clients in its plate reads them."""
    axes = {spec.name: spec.axis for spec in program.params}
    return {name: _plate_axis(value, axes[name]) for name, value in rows.items()}


def _plate_axis(value: Tensor, axis: int) -> Tensor:
    """Move the clients from the front to their dimension in the plate."""
    return value.squeeze(axis).movedim(0, axis)
