"""Skewed real responses: the skew normal."""

from __future__ import annotations

import math

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor

from hierfl.core.gaussians import log_normal_cdf
from hierfl.models.families.family import ResponseFamily
from hierfl.models.families.links import a_sigma, identity_scale, priors
from hierfl.models.families.rows import RowDistribution
from hierfl.program.recipes import recorded


class SkewNormal(RowDistribution):
    """The skew normal by its mean and standard deviation, as in brms.

        p(y) = 2 / w phi(z) Phi(alpha z),    z = (y - xi) / w
        w = scale / sqrt(1 - 2 d^2 / pi),    xi = loc - w d sqrt(2 / pi),    d = alpha / sqrt(1 + alpha^2)

    Args:
        loc: mean.
        scale: standard deviation.
        alpha: skewness parameter; 0 is the Normal.
        validate_args: whether to check values. Default None: Pyro's setting.

    Reference: Azzalini 1985, Scandinavian Journal of Statistics 12:171.
    """

    FIELDS = ("loc", "scale", "alpha")
    support = constraints.real

    def __init__(
        self, loc: Tensor, scale: Tensor, alpha: Tensor, *, validate_args: bool | None = None
    ) -> None:
        self.loc, self.scale, self.alpha = torch.broadcast_tensors(loc, scale, alpha)
        super().__init__(self.loc.shape, torch.Size(), validate_args=validate_args)

    def _standard(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return d, the scale w and the location xi of the density."""
        delta = self.alpha * torch.rsqrt(1.0 + self.alpha**2)
        width = self.scale * torch.rsqrt(1.0 - 2.0 / math.pi * delta**2)
        return delta, width, self.loc - width * delta * math.sqrt(2.0 / math.pi)

    def _log_prob(self, value: Tensor) -> Tensor:
        _, width, start = self._standard()
        z = (value - start) / width
        normal = -0.5 * z**2 - width.log() + 0.5 * math.log(2.0 / math.pi)
        return normal + log_normal_cdf(self.alpha * z)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance."""
        return self.loc, self.scale**2

    def _draw(self) -> Tensor:
        delta, width, start = self._standard()
        half, normal = torch.randn_like(self.loc).abs(), torch.randn_like(self.loc)
        return start + width * (delta * half + (1.0 - delta**2).sqrt() * normal)


@recorded
def skew_normal() -> ResponseFamily:
    """Return the family of skewed real responses of mean eta and standard deviation sigma.

        y ~ SkewNormal(mean eta, sd sigma, alpha)
        sigma ~ half-StudentT(3, 0, 2.5 sd(y)),    alpha ~ Normal(0, 4), as in brms

    The link is the identity. A positive alpha is a longer tail to the right.
    """
    likelihood = "families.SkewNormal(eta, sigma, alpha)"
    parameters = priors(sigma=a_sigma, alpha=lambda response: dist.Normal(0.0, 4.0))
    return ResponseFamily("skew_normal", "identity", "real", likelihood, parameters, identity_scale)
