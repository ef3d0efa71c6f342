"""Responses of one number: real ones, also skewed, positive amounts, shares, times and directions."""

import math

import numpy as np
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor

from hierfl.core.gaussians import log_normal_cdf
from hierfl.models.families.family import Response, ResponseFamily, no_parameters
from hierfl.models.families.links import (
    a_shape,
    a_sigma,
    check_link,
    half_student,
    identity_scale,
    inverse_scale,
    log_scale,
    priors,
    unit_scale,
)
from hierfl.models.families.rows import RowDistribution
from hierfl.models.families.survival import hazards, of_times
from hierfl.models.priors import Prior
from hierfl.program.sites import recorded

LIKELIHOODS = {
    "identity": "dist.Normal(eta, sigma)",
    "log": "dist.Normal(eta.exp(), sigma)",
    "inverse": "dist.Normal(1 / eta, sigma)",
}
SCALES = {"identity": identity_scale, "log": log_scale, "inverse": inverse_scale}
NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)
FARTHEST = 12.0  # in units of 1 / sqrt(concentration): beyond it there is no probability


@recorded
def exponential() -> ResponseFamily:
    """Return the family of times with a constant hazard and mean exp(eta), log link.

        y ~ Exponential(rate exp(-eta))

    Times may be censored or entered late (`Censored`): the row fields "cens", "upper" and "entry".
    """
    base = "dist.Exponential((-eta).exp())"
    return of_times("exponential", "log", base, no_parameters, log_scale)


class Weibull(dist.Weibull):  # type: ignore[misc]  # Any in Pyro
    """dist.Weibull with a log density that stays finite where (t / scale)^shape underflows."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density in nats, of the batch shape, of times > 0."""
        if self._validate_args:
            self._validate_sample(value)
        return hazards(self).log_density(value)


@recorded
def weibull() -> ResponseFamily:
    """Return the family of times with a Weibull distribution of mean exp(eta), log link.

        y ~ Weibull(exp(eta) / Gamma(1 + 1 / shape), shape),    shape ~ LogNormal(0, 1)

    The parametrization by the mean is that of brms. Its default prior of the shape, Gamma(0.01,
    0.01), allows shapes of thousands, under which all times are equal; here the hazard is as likely
    to rise as to fall, and nine of ten shapes lie between 0.2 and 5. Times may be censored or
    entered late (`Censored`): the row fields "cens", "upper" and "entry".
    """
    base = "families.Weibull((eta - torch.lgamma(1 + 1 / shape)).exp(), shape)"
    return of_times(
        "weibull", "log", base, priors(shape=lambda response: dist.LogNormal(0.0, 1.0)), log_scale
    )


def _lognormal_scale(response: Response) -> tuple[float, float]:
    """Return the mean and sd of log y, for a log-normal y of the response's mean and sd."""
    center, spread = log_scale(response)
    return center - 0.5 * spread**2, spread


def _sigma_of_logs(response: Response) -> Prior:
    spread = _lognormal_scale(response)[1]
    return half_student(spread if math.isfinite(spread) else 0.0)


@recorded
def lognormal() -> ResponseFamily:
    """Return the family of positive responses whose logarithm is Normal, identity link.

        log y ~ Normal(eta, sigma),    sigma ~ half-StudentT(3, 0, max(2.5, sd(log y)))

    exp(eta) is the median of y. The sd of log y is that of a log-normal with the mean and sd of the
    response. As times they may be censored or entered late (`Censored`): the row fields "cens",
    "upper" and "entry".
    """
    base = "dist.LogNormal(eta, sigma)"
    return of_times("lognormal", "identity", base, priors(sigma=_sigma_of_logs), _lognormal_scale)


class SkewNormal(RowDistribution):
    """The skew normal by its mean and standard deviation, as in brms.

        p(y) = 2 / w phi(z) Phi(alpha z),    z = (y - xi) / w
        w = scale / sqrt(1 - 2 d^2 / pi),    xi = loc - w d sqrt(2 / pi),    d = alpha / sqrt(1 + alpha^2)

    Args:
        loc: mean.
        scale: standard deviation.
        alpha: skewness parameter; 0 is the Normal.

    Reference: Azzalini 1985, Scandinavian Journal of Statistics 12:171.
    """

    FIELDS = ("loc", "scale", "alpha")
    support = constraints.real

    def __init__(self, loc: Tensor, scale: Tensor, alpha: Tensor) -> None:
        self.loc, self.scale, self.alpha = torch.broadcast_tensors(loc, scale, alpha)
        super().__init__(self.loc.shape, torch.Size())

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


class VonMises(dist.VonMises):  # type: ignore[misc]  # Any in Pyro
    """dist.VonMises with a log density that is exact in double precision, and a spread in radians."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density in nats, of the batch shape, of angles, in radians."""
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


@recorded
def gaussian(link: str = "identity") -> ResponseFamily:
    """Return the family of real responses with a Normal distribution.

        y ~ Normal(link^-1(eta), sigma),    sigma ~ half-StudentT(3, 0, 2.5 sd(y))

    Args:
        link: "identity", "log" or "inverse". Default "identity", as in brms.

    Raises:
        ValueError: link is none of these.
    """
    check_link(link, [*LIKELIHOODS], "gaussian")
    return ResponseFamily(
        "gaussian", link, "real", LIKELIHOODS[link], priors(sigma=a_sigma), SCALES[link]
    )


@recorded
def student() -> ResponseFamily:
    """Return the family of real responses with a Student t distribution, identity link.

        y ~ StudentT(nu, eta, sigma)
        sigma ~ half-StudentT(3, 0, 2.5 sd(y)),    nu ~ Gamma(2, 0.1)

    brms truncates the prior of nu at 1; here it is not truncated, and has 0.5% of its mass below
    1.
    """
    likelihood = "dist.StudentT(nu, eta, sigma)"
    parameters = priors(sigma=a_sigma, nu=lambda response: dist.Gamma(2.0, 0.1))
    return ResponseFamily("student", "identity", "real", likelihood, parameters, identity_scale)


@recorded
def gamma() -> ResponseFamily:
    """Return the family of positive responses with a Gamma distribution of mean exp(eta), log link.

        y ~ Gamma(shape, shape / exp(eta)),    var(y) = exp(2 eta) / shape
        shape ~ InverseGamma(0.4, 0.3)

    The link is log, as it is in most uses of brms, whose default for this family is the inverse.
    """
    likelihood = "dist.Gamma(shape, shape * (-eta).exp())"
    return ResponseFamily("gamma", "log", "positive", likelihood, priors(shape=a_shape), log_scale)


@recorded
def beta() -> ResponseFamily:
    """Return the family of shares with mean logit^-1(eta) and precision phi, logit link.

    y ~ Beta(p phi, (1 - p) phi),    var(y) = p (1 - p) / (1 + phi)
    phi ~ InverseGamma(0.4, 0.3)
    """
    likelihood = "dist.Beta(eta.sigmoid() * phi, (-eta).sigmoid() * phi)"
    return ResponseFamily("beta", "logit", "unit", likelihood, priors(phi=a_shape), unit_scale)
