"""What trials read off a program."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hierfl.laplace.trials import jacobian_of


@pytest.mark.parametrize(("rows", "scalars"), [(2, 5), (40, 3)])
def test_slopes_take_as_few_backward_passes_as_they_have_sides(
    rows: int, scalars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop over 50 columns had 235 predictors of eight scalars, and a backward pass of each."""
    g = torch.Generator().manual_seed(0)
    design, at = torch.randn(rows, scalars, generator=g), torch.randn(scalars, generator=g)
    design[:, -1] = 0.0
    passes, grad = [], torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes.append(args)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)

    def curve(v: Tensor) -> Tensor:
        return (design @ v).sin()

    expected = (design @ at).cos()[:, None] * design
    found = jacobian_of(curve, at)
    assert torch.allclose(found, expected, atol=1e-12)
    assert bool((found[:, -1] == 0.0).all())
    assert len(passes) <= min(rows, scalars) + 1
    assert torch.equal(jacobian_of(lambda v: torch.ones(rows), at), torch.zeros(rows, scalars))
