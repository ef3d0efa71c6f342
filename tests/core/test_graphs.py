"""Recorded operations of a function: the same values and derivatives; none where values decide."""

from collections.abc import Callable

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions.utils import vec_to_tril_matrix

from hierfl.core.graphs import graph_of, needed_by, recorded
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


def test_a_graph_stops_derivatives_where_its_function_does() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.detach() * x).sum()

    graph, x = graph_of(function, torch.ones(3)), torch.arange(3.0, requires_grad=True)
    assert graph is not None
    torch.testing.assert_close(torch.autograd.grad(graph(x), x)[0], x.detach())


def branches(x: Tensor) -> Tensor:
    """Look at a value."""
    return x.sum() if bool(x[0] > 0.0) else x.prod()


def changes(x: Tensor) -> Tensor:
    """Change its argument."""
    x[0] = 2.0 * x[1]
    return x.sum()


OUTSIDE = torch.zeros(3)


def collects(x: Tensor) -> Tensor:
    """Change a tensor that outlives the call."""
    OUTSIDE.add_(x)
    return OUTSIDE.sum() + x.sum()


def changes_a_view(x: Tensor) -> Tensor:
    """Change a part, and read the whole."""
    whole = x * 2.0
    whole[1:].add_(x[1:])
    return whole.sum()


def is_seen_in_a_view(x: Tensor) -> Tensor:
    """Change the whole, and read a part."""
    whole = x * 2.0
    part = whole[1:]
    whole.add_(x)
    return part.sum()


def is_seen_detached(x: Tensor) -> Tensor:
    """Change a tensor, and read what shares its memory without being a view."""
    whole = x * 2.0
    same = whole.detach()
    whole.add_(x)
    return same.sum()


def changes_detached(x: Tensor) -> Tensor:
    """Change the argument by what shares its memory."""
    x.detach().add_(1.0)
    return x.sum()


def counts(x: Tensor) -> Tensor:
    """Change a constant between two readings of it."""
    step = torch.zeros(())
    step += 1.0
    once = x.sum() * step
    step += 1.0
    return once + x.sum() * step


def forgets(x: Tensor) -> Tensor:
    """Depend on nothing."""
    return torch.ones(())


def converts(x: Tensor) -> Tensor:
    """Leave torch."""
    return x * float(x.sum())


def in_place(x: Tensor) -> Tensor:
    """Change tensors of its own: a copy of its argument, and the matrix of a triangle."""
    y = x.clone()
    y[0] = 2.0 * x[1]
    before = y * 3.0
    y.mul_(x).add_(1.0)
    tril = vec_to_tril_matrix(x, diag=-1)
    return (before + y + x).sum() + (tril @ tril.mT).sum()


def test_changes_of_a_function_s_own_tensors_are_recorded() -> None:
    graph = graph_of(in_place, torch.zeros(3))
    assert graph is not None
    x = torch.randn(5, 3, requires_grad=True)
    known = torch.stack([in_place(row) for row in x])
    found = torch.vmap(graph)(x)
    torch.testing.assert_close(found, known)
    one, other = (torch.autograd.grad(v.sum(), x)[0] for v in (found, known))
    torch.testing.assert_close(one, other)


OTHERS = [changes, collects, changes_a_view, is_seen_in_a_view]
OTHERS += [is_seen_detached, changes_detached, counts]


def changes_a_constant_view(x: Tensor) -> Tensor:
    whole = torch.cat([torch.zeros(2), x])
    whole[:2].add_(1.0)
    return whole.sum()


@pytest.mark.parametrize(
    "function", [branches, forgets, converts, changes_a_constant_view, *OTHERS]
)
def test_control_flow_on_values_has_no_graph(function: Callable[[Tensor], Tensor]) -> None:
    assert graph_of(function, torch.ones(3)) is None


def test_entries_that_are_only_moved_stay_constant() -> None:
    def padded(x: Tensor) -> Tensor:
        whole = torch.cat([torch.zeros(2), x])[torch.tensor([2, 0, 1, 3])]
        first, none, last = whole.split([1, 2, 1])
        return first.sum() + (none.reshape(2, 1) + 2.0).exp().sum() * last.sum()

    graph = graph_of(padded, torch.ones(2))
    assert graph is not None
    x = torch.randn(5, 2)
    torch.testing.assert_close(torch.vmap(graph)(x), torch.stack([padded(v) for v in x]))
    seen = recorded(padded, torch.ones(2))
    assert seen is not None
    names = [of.function.__name__ for of in needed_by([seen.end], seen.operations)]
    assert "exp" not in names
    assert "split" in names
