"""Real numbers, positive amounts and shares: Gaussian, Student t, Gamma and Beta responses."""

from __future__ import annotations

import pyro.distributions as dist

from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import (
    check_link,
    half_student,
    identity_scale,
    inverse_scale,
    log_scale,
    phi,
    shape,
    unit_scale,
)
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded

LIKELIHOODS = {
    "identity": "dist.Normal(eta, sigma)",
    "log": "dist.Normal(eta.exp(), sigma)",
    "inverse": "dist.Normal(1 / eta, sigma)",
}
SCALES = {"identity": identity_scale, "log": log_scale, "inverse": inverse_scale}


def _gaussian_parameters(response: Response) -> dict[str, Prior]:
    return {"sigma": half_student(response.sd, response.sd)}


@recorded
def gaussian(link: str = "identity") -> ResponseFamily:
    """Return the family of real responses with a Normal distribution.

        y ~ Normal(link^-1(eta), sigma),    sigma ~ half-StudentT(3, 0, 2.5 sd(y))

    Args:
        link: "identity", "log" or "inverse". Default "identity", as in brms.

    Raises:
        ValueError: link is none of these.

    >>> gaussian().likelihood
    'dist.Normal(eta, sigma)'
    """
    check_link(link, [*LIKELIHOODS], "gaussian")
    return ResponseFamily(
        "gaussian", link, "real", LIKELIHOODS[link], _gaussian_parameters, SCALES[link]
    )


def _student_parameters(response: Response) -> dict[str, Prior]:
    return {"sigma": half_student(response.sd, response.sd), "nu": dist.Gamma(2.0, 0.1)}


@recorded
def student() -> ResponseFamily:
    """Return the family of real responses with a Student t distribution, identity link.

        y ~ StudentT(nu, eta, sigma)
        sigma ~ half-StudentT(3, 0, 2.5 sd(y)),    nu ~ Gamma(2, 0.1)

    brms truncates the prior of nu at 1; here it is not truncated, and has 0.5 % of its mass below
    1.

    >>> student().likelihood
    'dist.StudentT(nu, eta, sigma)'
    """
    likelihood = "dist.StudentT(nu, eta, sigma)"
    return ResponseFamily(
        "student", "identity", "real", likelihood, _student_parameters, identity_scale
    )


@recorded
def gamma() -> ResponseFamily:
    """Return the family of positive responses with a Gamma distribution of mean exp(eta), log link.

        y ~ Gamma(shape, shape / exp(eta)),    var(y) = exp(2 eta) / shape
        shape ~ InverseGamma(0.4, 0.3)

    The link is log, as it is in most uses of brms, whose default for this family is the inverse.

    >>> gamma().likelihood
    'dist.Gamma(shape, shape * (-eta).exp())'
    """
    return ResponseFamily(
        "gamma", "log", "positive", "dist.Gamma(shape, shape * (-eta).exp())", shape, log_scale
    )


@recorded
def beta() -> ResponseFamily:
    """Return the family of shares with mean logit^-1(eta) and precision phi, logit link.

        y ~ Beta(p phi, (1 - p) phi),    var(y) = p (1 - p) / (1 + phi)
        phi ~ InverseGamma(0.4, 0.3)

    >>> beta().likelihood
    'dist.Beta(eta.sigmoid() * phi, (-eta).sigmoid() * phi)'
    """
    likelihood = "dist.Beta(eta.sigmoid() * phi, (-eta).sigmoid() * phi)"
    return ResponseFamily("beta", "logit", "unit", likelihood, phi, unit_scale)
