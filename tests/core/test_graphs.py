"""Recorded operations of a function: the same values and derivatives; none where values decide."""

from collections.abc import Callable

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from hierfl.core.graphs import graph_of
from hierfl.laplace.links import softplus


def density(x: Tensor, y: Tensor) -> Tensor:
    """Return a log density with repeated and idle operations, a constant and an index."""
    scale = (x[0] * 1.0 + 0.0).exp()
    again = (x[0] * 1.0 + 0.0).exp()
    loc = torch.cat([x[1:] @ torch.ones(2, 3)]).expand(3) + torch.arange(3.0)
    each = dist.Normal(loc, scale + again, validate_args=False).log_prob(y) - softplus(loc)
    return each.sum() + torch.where(y > 0.0, loc, -loc).sum()


def test_a_graph_has_the_values_and_derivatives_of_its_function() -> None:
    graph = graph_of(density, torch.zeros(3), torch.zeros(3))
    assert graph is not None
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        x, y = torch.randn(3, generator=g, requires_grad=True), torch.randn(3, generator=g)
        found, known = graph(x, y), density(x, y)
        torch.testing.assert_close(found, known, rtol=0.0, atol=0.0)
        one, other = (torch.autograd.grad(v, x, create_graph=True)[0] for v in (found, known))
        torch.testing.assert_close(one, other)
        second = (torch.autograd.grad(v.square().sum(), x)[0] for v in (one, other))
        torch.testing.assert_close(*second)


def test_a_graph_can_be_mapped() -> None:
    graph = graph_of(density, torch.zeros(3), torch.zeros(3))
    assert graph is not None
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    known = torch.stack([density(a, b) for a, b in zip(x, y, strict=True)])
    torch.testing.assert_close(torch.vmap(graph)(x, y), known)


def branches(x: Tensor) -> Tensor:
    """Look at a value."""
    return x.sum() if bool(x[0] > 0.0) else x.prod()


def changes(x: Tensor) -> Tensor:
    """Change a tensor in place."""
    y = x.clone()
    y[0] = 2.0 * x[1]
    return y.sum()


def forgets(x: Tensor) -> Tensor:
    """Depend on nothing."""
    return torch.ones(())


def converts(x: Tensor) -> Tensor:
    """Leave torch."""
    return x * float(x.sum())


def in_place(x: Tensor) -> Tensor:
    """Add in place."""
    return (x * 2.0).add_(x).sum()


@pytest.mark.parametrize("function", [branches, changes, forgets, converts, in_place])
def test_what_depends_on_values_or_changes_tensors_has_no_graph(
    function: Callable[[Tensor], Tensor],
) -> None:
    assert graph_of(function, torch.ones(3)) is None
