"""Signed scales x, sampled as u = asinh(x / width): their polynomial tails become exponential.

A scale of few clients has a long tail, which Hamiltonian Monte Carlo in x seldom reaches: its steps
suit the middle. Within the width u is nearly linear in x, beyond it logarithmic. The density of u
includes the Jacobian width cosh(u).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hierfl.summaries.chains import Density, Whitening

# widths in medians of |x|: of a normal x, the density of u has two modes below 1.5, and is nearly
# normal from 3
WIDE = 3.0
NARROWEST = 1e-6  # of a scale whose draws are all nearly 0


@dataclass(frozen=True, eq=False)
class Stretch:
    """The change of coordinates between x and u; it changes signed scales alone.

    Args:
        even: (K,) bool, which coordinates are signed scales.
        width: (K,).
    """

    even: Tensor
    width: Tensor

    def to_u(self, x: Tensor) -> Tensor:
        """Return u of x (..., K)."""
        return torch.where(self.even, torch.asinh(x / self.width), x)

    def from_u(self, u: Tensor) -> Tensor:
        """Return x of u (..., K)."""
        return torch.where(self.even, self.width * torch.sinh(u), u)

    def density(self, of_x: Density) -> Density:
        """Return the log density of u and its gradient, given those of x."""

        def at(u: Tensor) -> tuple[Tensor, Tensor]:
            value, slope = of_x(self.from_u(u))
            signed = torch.where(self.even, u, 0.0)
            return value + signed.cosh().log().sum(1), slope * self._slope(u) + signed.tanh()

        return at

    def whitening_in_u(self, of_x: Whitening) -> Whitening:
        """Return a whitening of u that is that of x to first order, at its middle."""
        loc = self.to_u(of_x.loc)
        return Whitening(loc, of_x.tril / self._slope(loc)[:, None])

    def whitening_in_x(self, of_u: Whitening) -> Whitening:
        """Return a whitening of x that is that of u to first order, at its middle."""
        return Whitening(self.from_u(of_u.loc), of_u.tril * self._slope(of_u.loc)[:, None])

    def _slope(self, u: Tensor) -> Tensor:
        """Return dx/du (..., K)."""
        return torch.where(self.even, self.width * u.cosh(), 1.0)


def stretch(points: Tensor, even: Tensor) -> Stretch:
    """Return the change of coordinates that suits points x (n, K) of the density."""
    return Stretch(even, (WIDE * points.abs().median(0).values).clamp(min=NARROWEST))
