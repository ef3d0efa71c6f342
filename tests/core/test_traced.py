"""Recorded gradients: those of the function, once a shape; and their work, counted."""

from contextlib import suppress
from functools import partial
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from hierfl.core import traced
from hierfl.core.graphs import Operation, simplified
from hierfl.core.traced import Gradient, WorkCounter

DATA = torch.tensor([0.3, -1.0, 2.0])


def density(x: Tensor, scale: Tensor) -> Tensor:
    """Return log densities of points (S, 2), by a program under vmap."""

    def one(z: Tensor) -> Tensor:
        rows = dist.Normal(z[0], z[1].exp() + scale, validate_args=False).log_prob(DATA)
        return rows.sum() - torch.linalg.cholesky_ex(torch.eye(2) + z.outer(z)).L.sum()

    return torch.vmap(one)(x)


def branching(x: Tensor, scale: Tensor) -> Tensor:
    """Look at a value, which no recorded operations can."""
    return density(x, scale) if bool(x.sum() > 0.0) else -density(x, scale)


def test_a_recorded_gradient_is_that_of_the_function_at_other_points_and_tensors() -> None:
    calls = list[int]()

    def counted(x: Tensor, scale: Tensor) -> Tensor:
        calls.append(len(x))
        return density(x, scale)

    gradient = Gradient(counted)
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        x, scale = torch.randn(5, 2, generator=g), torch.rand(3, generator=g)
        for one, other in zip(gradient(x, scale), gradient.eager(x, scale), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    eager, recorded = 4, 2  # and compared at one more point
    assert len(calls) == eager + recorded
    gradient(torch.zeros(3, 2), torch.ones(3))
    assert len(gradient.recorded) == 2


def test_a_function_of_branches_is_not_recorded() -> None:
    gradient, scale = Gradient(branching), torch.ones(3)
    for x in (torch.ones(4, 2), -torch.ones(4, 2)):
        for one, other in zip(gradient(x, scale), gradient.eager(x, scale), strict=True):
            assert torch.equal(one, other)
    signs = gradient(torch.ones(4, 2), scale)[0], gradient(-torch.ones(4, 2), scale)[0]
    assert (signs[0] < 0.0).all() and (signs[1] > 0.0).all()


def test_a_loop_that_may_end_early_is_recorded_whole() -> None:
    def root(x: Tensor) -> Tensor:
        y = torch.ones_like(x)
        for _ in range(10):
            y = y - (y.square() - x) / (2.0 * y)
            with suppress(RuntimeError):
                if bool(((y.square() - x).abs() < 1e-3).all()):
                    break
        return y.sum(1)

    gradient = Gradient(root)
    for x in (torch.full((3, 2), 2.0), torch.full((3, 2), 50.0)):
        value, slope = gradient(x)
        torch.testing.assert_close(value, x.sqrt().sum(1))
        torch.testing.assert_close(slope, 0.5 * x.rsqrt())
    (script,) = gradient.recorded.values()
    assert script.run != gradient.eager


def test_a_recorded_function_may_change_tensors_in_place() -> None:
    outside = torch.zeros(3)

    def filled(x: Tensor, into: Tensor) -> Tensor:
        into[0] = x.sum().detach()
        return x.square().sum(1) + into.sum()

    inner, outer = (
        Gradient(lambda x: filled(x, torch.zeros(3))),
        Gradient(lambda x: filled(x, outside)),
    )
    for x in (torch.ones(4, 2), -torch.ones(4, 2)):
        for gradient in (inner, outer):
            for one, other in zip(gradient(x), gradient.eager(x), strict=True):
                assert torch.equal(one, other)


def test_what_repeats_or_does_not_depend_on_the_points_is_recorded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = list[list[Operation]]()

    def noted(*args: Any) -> tuple[list[Operation], list[Any]]:
        calls, ends = simplified(*args)
        kept.append(calls)
        return calls, ends

    monkeypatch.setattr(traced, "simplified", noted)
    table = torch.arange(12.0).view(4, 3)
    weights = table.square().cumsum(0).sum(0)

    def repeating(x: Tensor) -> Tensor:
        sizes = [(x * 1.0).contiguous().exp() + 0.0 for _ in range(5)]
        return (sum(sizes, x) * table.square().cumsum(0).sum(0)).sum(1)

    def once(x: Tensor) -> Tensor:
        e = x.exp()
        return ((x + e + e + e + e + e) * weights).sum(1)

    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    gradients = Gradient(repeating), Gradient(once)
    for of in (x, 2.0 * x):
        for value, other in zip(*(gradient(of) for gradient in gradients), strict=True):
            torch.testing.assert_close(value, other)
    assert len(kept[0]) <= len(kept[1])


def test_sums_of_few_entries_are_those_of_torch() -> None:
    g = torch.Generator().manual_seed(0)
    rows, points = torch.randn(500, 3, generator=g), torch.randn(4, 3, generator=g)
    gradient = Gradient(lambda x: ((x[:, None] * rows).sum(-1).exp()).sum(1))
    for value, other in zip(gradient(points), gradient.eager(points), strict=True):
        torch.testing.assert_close(value, other)


def test_work_is_counted_and_grows_with_points_and_without_a_record() -> None:
    scale, times = torch.ones(3), {}
    for count in (100, 100_000):
        gradient = Gradient(density)
        times[count] = gradient.seconds(torch.zeros(count, 2), scale)
        assert gradient.seconds(torch.zeros(count, 2), scale) == times[count]
    assert times[100_000] > 5.0 * times[100]
    assert Gradient(branching).seconds(torch.ones(100, 2), scale) > times[100]


def test_functions_of_each_scalar_are_no_matrix_operations() -> None:
    x = torch.ones(100, 100)
    scalars = []
    for of in (torch.lgamma, partial(torch.polygamma, 1), torch.exp, lambda v: v @ v):
        with WorkCounter() as counter:
            of(x)
        scalars.append(counter.scalars)
    assert scalars[:3] == [x.numel()] * 3
    assert scalars[3] > x.numel()
