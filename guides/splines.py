"""A normalizing flow of a few numbers, by pointwise operations alone.

It therefore runs under `torch.vmap` and compiles. Pyro's spline selects the numbers inside its box
by a boolean mask, which `torch.vmap` does not allow. Pyro's autoregressive networks are used here.
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

LEAST = 1e-3  # the least share of the box that a piece has, and the least slope
LEVEL = math.log(math.expm1(1.0 - LEAST))  # LEAST + softplus(LEVEL) is 1, the slope of the identity


def spline(
    x: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, *, bound: float
) -> tuple[Tensor, Tensor]:
    """Apply a monotone rational-quadratic spline on [-bound, bound], and the identity outside.

    Return y and log dg/dx, (...) each. Widths and heights (..., bins) of the pieces come before a
    softmax, the slopes (..., bins - 1) between them before a softplus. All 0, it is the identity.
    Reference: Eq. (4) and (5), Durkan et al. 2019, arXiv:1906.04032.
    """
    left, width = _pieces(widths, bound)
    low, height = _pieces(heights, bound)
    slope = pad(LEAST + softplus(slopes + LEVEL), (1, 1), value=1.0)
    inside = x.clamp(-bound, bound)
    piece = (inside[..., None] >= left).sum(-1, keepdim=True).clamp(min=1) - 1

    def at_piece(values: Tensor) -> Tensor:
        return values.gather(-1, piece)[..., 0]

    w, h, s0, s1 = (
        at_piece(width),
        at_piece(height),
        at_piece(slope[..., :-1]),
        at_piece(slope[..., 1:]),
    )
    mean_slope, t = h / w, (inside - at_piece(left)) / w
    product = t * (1.0 - t)
    denominator = mean_slope + (s0 + s1 - 2.0 * mean_slope) * product
    y = at_piece(low) + h * (mean_slope * t**2 + s0 * product) / denominator
    numerator = s1 * t**2 + 2.0 * mean_slope * product + s0 * (1.0 - t) ** 2
    log_slope = 2.0 * mean_slope.log() + numerator.log() - 2.0 * denominator.log()
    outside = x.abs() > bound
    return torch.where(outside, x, y), torch.where(outside, 0.0, log_slope)


def _pieces(raw: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Return the left ends and the lengths of the pieces of the box, (..., bins) each."""
    share = LEAST + (1.0 - LEAST * raw.shape[-1]) * raw.softmax(-1)
    length = 2.0 * bound * share
    return length.cumsum(-1) - length - bound, length


class SplineFlow(nn.Module):
    """The flow f(e) with its log |det df/de|: a spline flow, followed by an affine flow.

    The spline of each number depends on the numbers before it; its shift and scale then depend on
    those after it. Two masked networks (Germain et al. 2015, arXiv:1502.03509) compute the
    parameters. The flow starts near the identity. A draw of a standard Normal lies outside the
    default bound once in 5e8 times.
    """

    def __init__(self, size: int, *, hidden: int, bins: int, bound: float = 6.0) -> None:
        super().__init__()
        self.bound = bound
        order: Any = torch.arange(size)
        width = [max(hidden, size)] * 2
        with warnings.catch_warnings():
            # for size 1 Pyro warns that there is nothing to condition on
            warnings.simplefilter("ignore")
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
        """Return f(e) (..., size) and log |det df/de| (...) for e (..., size)."""
        bent, log_slope = spline(e, *(p.mT for p in self.bends(e)), bound=self.bound)
        move, log_scale = self.moves(bent)
        return bent * log_scale.exp() + move, (log_slope + log_scale).sum(-1)
