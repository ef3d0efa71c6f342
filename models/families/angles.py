"""Directions: von Mises responses."""

from __future__ import annotations

import math

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.models.families.family import ResponseFamily
from hierfl.models.families.links import priors, unit_scale
from hierfl.program.recipes import recorded

NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)
FARTHEST = 12.0  # in units of 1 / sqrt(concentration): beyond it there is no probability


class VonMises(dist.VonMises):  # type: ignore[misc]  # Any in Pyro
    """dist.VonMises with a log density that is exact in double precision, and a spread in radians."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density in nats, of the batch shape.

        Args:
            value: angles, in radians.
        """
        if self._validate_args:
            self._validate_sample(value)
        # cos(x) - 1, and log I_0(k) - k, which stay exact for large concentrations
        cosine_less_1 = -2.0 * (0.5 * (value - self.loc)).sin() ** 2
        bessel = torch.special.i0e(self.concentration).log()
        return self.concentration * cosine_less_1 - bessel - math.log(2.0 * math.pi)

    @property
    def variance(self) -> Tensor:
        """The mean square of the angle between a draw and the mean direction, in square radians."""
        k = self.concentration.double()
        half = 0.5 * (FARTHEST * k.rsqrt()).clamp(max=math.pi)
        total = torch.zeros_like(k)
        for node, weight in zip(NODES.tolist(), WEIGHTS.tolist(), strict=True):
            angle = half * (node + 1.0)
            density = (-2.0 * k * (0.5 * angle).sin() ** 2).exp()
            total = total + weight * half * angle**2 * density
        square: Tensor = total / (math.pi * torch.special.i0e(k))
        return square.to(self.concentration.dtype)


@recorded
def von_mises() -> ResponseFamily:
    """Return the family of angles from -pi to pi, with the link tan(mu / 2).

        y ~ VonMises(mu, kappa),    tan(mu / 2) = eta,    kappa ~ Gamma(2, 0.01), as in brms

    mu is the mean direction, in radians, and kappa the concentration around it: 0 is uniform. The
    link has no value at -pi and pi: turn the angles, so that few of them lie there. The mean of a
    row is mu, and its variance the mean square of the angle between y and mu.
    """
    kappa = priors(kappa=lambda response: dist.Gamma(2.0, 0.01))
    likelihood = "families.VonMises(2 * eta.atan(), kappa)"
    return ResponseFamily("von_mises", "tan_half", "angle", likelihood, kappa, unit_scale)
