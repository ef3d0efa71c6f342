"""A normalising flow for a few numbers, in pointwise steps alone: it runs under `torch.vmap`, and compiles.

Pyro's spline picks what lies inside its box by a boolean mask, which `torch.vmap` refuses; its networks are what is used here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from pyro.nn import AutoRegressiveNN
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

LEAST = 1e-3  # of a piece's share of the box, and of a slope
LEVEL = math.log(math.expm1(1.0 - LEAST))  # softplus of it, and LEAST, are a slope of 1


def spline(
    x: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, *, bound: float
) -> tuple[Tensor, Tensor]:
    """Y = g(x) and log dg/dx, (...) each: a monotone rational-quadratic spline on [-bound, bound], the identity outside.

    Widths, heights and slopes of 0 make it the identity inside too.

    Args:
        x: (...).
        widths: (..., K), of its pieces along x, before a softmax.
        heights: (..., K), along y, before a softmax.
        slopes: (..., K - 1), at the knots between them, before a softplus; 1 at both ends.
        bound: > 0.

    Reference: Eq. (4) and (5), Durkan et al. 2019, arXiv:1906.04032.
    """
    left, width = _pieces(widths, bound)
    low, height = _pieces(heights, bound)
    slope = pad(LEAST + softplus(slopes + LEVEL), (1, 1), value=1.0)
    inside = x.clamp(-bound, bound)
    piece = (inside[..., None] >= left).sum(-1, keepdim=True).clamp(min=1) - 1

    def there(values: Tensor) -> Tensor:
        return values.gather(-1, piece)[..., 0]

    w, h, s0, s1 = there(width), there(height), there(slope[..., :-1]), there(slope[..., 1:])
    steep, t = h / w, (inside - there(left)) / w
    both = t * (1.0 - t)
    below = steep + (s0 + s1 - 2.0 * steep) * both
    y = there(low) + h * (steep * t**2 + s0 * both) / below
    rise = s1 * t**2 + 2.0 * steep * both + s0 * (1.0 - t) ** 2
    log_slope = 2.0 * steep.log() + rise.log() - 2.0 * below.log()
    outside = x.abs() > bound
    return torch.where(outside, x, y), torch.where(outside, 0.0, log_slope)


def _pieces(raw: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Where the K pieces of the box begin, and how long they are, (..., K) each."""
    share = LEAST + (1.0 - LEAST * raw.shape[-1]) * raw.softmax(-1)
    length = 2.0 * bound * share
    return length.cumsum(-1) - length - bound, length


class SplineFlow(nn.Module):
    """f(e) and log |det df/de|: a spline of each number given those before it, then a shift and scale given those after it.

    Two masked networks (Germain et al. 2015, arXiv:1502.03509) make the parameters; the start is close to the identity.

    Args:
        size: d, numbers.
        hidden: width of the networks, at least d.
        bins: pieces of each spline.
        bound: the splines' box; a Normal draw lies outside [-6, 6] once in 5e8 times, so that what is there can spoil nothing.
    """

    def __init__(self, size: int, *, hidden: int, bins: int, bound: float = 6.0) -> None:
        super().__init__()
        self.bound = bound
        order: Any = torch.arange(size)
        width = [max(hidden, size)] * 2
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # for size 1 Pyro advises against a network: there is nothing to condition on
            bends = AutoRegressiveNN(
                size, width, [bins, bins, bins - 1], order, nonlinearity=nn.Tanh()
            )
            moves = AutoRegressiveNN(size, width, [1, 1], order.flip(0), nonlinearity=nn.Tanh())
        self.bends: Callable[[Tensor], tuple[Tensor, ...]] = bends
        self.moves: Callable[[Tensor], tuple[Tensor, ...]] = moves
        for network in (bends, moves):
            last: Any = network.layers[-1]
            last.weight.data.mul_(0.01)
            last.bias.data.zero_()

    def forward(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """One pass, (..., d) -> (..., d) and (...)."""
        bent, log_slope = spline(e, *(p.mT for p in self.bends(e)), bound=self.bound)
        move, log_scale = self.moves(bent)
        return bent * log_scale.exp() + move, (log_slope + log_scale).sum(-1)
