"""Local params of N clients, stacked client by client or along the plate of a pooled program."""

from __future__ import annotations

from torch import Tensor

from hierfl.program.program import Params, Program


def stacked(program: Program, rows: Params) -> Params:
    """Local params of N clients, (N, *one client's shape), as the one tensor that a plate of N clients asks for."""
    axes = {spec.name: spec.axis for spec in program.params}
    return {name: _plate_axis(value, axes[name]) for name, value in rows.items()}


def unstacked(program: Program, params: Params) -> Params:
    """The inverse of `stacked`."""
    axes = {spec.name: spec.axis for spec in program.params}
    return {
        name: value.movedim(axes[name], 0).unsqueeze(axes[name]) for name, value in params.items()
    }


def _plate_axis(value: Tensor, axis: int) -> Tensor:
    return value.squeeze(axis).movedim(0, axis)
