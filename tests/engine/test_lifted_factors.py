"""Steps that differ in a step size alone have the same graph, and the same numbers as without lifting."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hierfl.engine import graph_rewrites as passes
from hierfl.engine.compiled import Graphs
from hierfl.engine.graph_inputs import lift_factors
from hierfl.optimizers import Adam
from tests.engine.stepped import stepped

Step = Callable[..., Tensor]


def pulled(lr: float) -> Step:
    """Return a step on a loss with a prior, of the step size `lr`; its gradient is added in place."""
    return lambda w, near, a, b: w - lr * (torch.bmm(a, b) + 15.0 * (w - near))


def by_adam(lr: float) -> Step:
    """Return Adam's second step from a gradient, of the step size `lr`."""

    def step(w: Tensor, near: Tensor, a: Tensor, b: Tensor) -> Tensor:
        optimizer, gradient = Adam(lr), torch.bmm(a, b) + 2.0 * (w - near)
        _, state = optimizer.update({"w": gradient}, optimizer.init({"w": w}))
        return w + optimizer.update({"w": gradient}, state)[0]["w"]

    return step


def inputs() -> tuple[Tensor, ...]:
    return torch.randn(3, 5, 7), torch.randn(5, 7), torch.randn(3, 5, 4), torch.randn(3, 4, 7)


def traced(step: Step) -> tuple[fx.GraphModule, list[Tensor], fx.GraphModule]:
    """Return a step's graph with its factors lifted, their values, and the graph without that."""
    plain, found = make_fx(step)(*inputs()), make_fx(step)(*inputs())
    passes.rewrite(plain)
    passes.rewrite(found)
    return found, lift_factors(found), plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [pulled, by_adam])
def test_step_sizes_are_inputs_of_a_graph(
    rule: Callable[[float], Step], dtype: torch.dtype
) -> None:
    torch.set_default_dtype(dtype)
    (one, of_one, plain), (two, of_two, _) = traced(rule(0.013)), traced(rule(0.3))
    assert one.code == two.code
    assert len(of_one) == len(of_two) and any(
        not torch.equal(a, b) for a, b in zip(of_one, of_two, strict=True)
    )
    given = inputs()
    assert torch.equal(one(*given, *of_one), plain(*given))
    torch.testing.assert_close(two(*given, *of_two), rule(0.3)(*given))


def test_a_factor_has_one_input_however_often_it_is_used() -> None:
    def step(w: Tensor) -> Tensor:
        return (w - 0.3 * w.square()) - 0.3 * (w - 0.3 * w.square()).square()

    found = make_fx(step)(torch.randn(4))
    assert [float(value) for value in lift_factors(found)] == [pytest.approx(0.3)]


def test_numbers_of_derivatives_stay_in_the_graph() -> None:
    def step(w: Tensor) -> Tensor:
        return -1.0 * (0.5 * w.square() + 2.0 * w) + 0.7

    found = make_fx(step)(torch.randn(4))
    before = found.code
    assert lift_factors(found) == [] and found.code == before


def test_integers_times_a_number_are_left_alone() -> None:
    def step(count: Tensor) -> Tensor:
        return count * 0.3

    found = make_fx(step)(torch.arange(4))
    assert lift_factors(found) == []


def test_a_compiled_step_with_another_step_size_gives_its_own_numbers() -> None:
    given = inputs()
    for lr in (0.013, 0.3):
        for rule in (pulled, by_adam):
            found = stepped(Graphs(), rule(lr), *(v.clone() for v in given))
            torch.testing.assert_close(found, rule(lr)(*given))
