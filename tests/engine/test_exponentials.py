"""Exponentials of compiled steps: to one unit in the last place, with NaN and both infinities kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hierfl.engine.compiled import Graphs
from hierfl.engine.exponentials import INLINE, inlined

# of full vectors and of the rest behind them
INSIDE = torch.linspace(-86.0, 88.7, 30_003, dtype=torch.float32)
OUTSIDE = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 88.8, -104.5, 0.0, -0.0] * 4)


def compiled(x: Tensor) -> Tensor:
    graphs = Graphs()
    found: Tensor = graphs.run("exp", lambda v: v.exp() + 0.0 * v.sign(), x)
    assert None not in graphs.made.values()
    return found


def test_exponentials_are_right_to_one_unit_in_the_last_place() -> None:
    exact = INSIDE.double().exp()
    unit = torch.finfo(torch.float32).eps
    assert ((compiled(INSIDE) - exact) / exact).abs().max() < unit


def test_what_is_no_number_and_what_has_no_float32_is_as_torch_has_it() -> None:
    x = OUTSIDE.float()
    found = Graphs().run("exp", torch.exp, x)
    torch.testing.assert_close(found, x.exp(), equal_nan=True, rtol=0.0, atol=0.0)


def test_inductor_is_as_before_afterwards() -> None:
    from torch._inductor.codegen.cpp import CppVecOverrides

    before = CppVecOverrides.exp("x")
    with inlined():
        assert CppVecOverrides.exp("x") == INLINE.format("x")
    assert CppVecOverrides.exp("x") == before
