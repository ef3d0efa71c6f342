"""Real numbers, positive amounts and shares: Gaussian, Student t, Gamma and Beta responses."""

from __future__ import annotations

import pyro.distributions as dist

from hierfl.models.families.family import ResponseFamily
from hierfl.models.families.links import (
    a_shape,
    a_sigma,
    check_link,
    identity_scale,
    inverse_scale,
    log_scale,
    priors,
    unit_scale,
)
from hierfl.program.recipes import recorded

LIKELIHOODS = {
    "identity": "dist.Normal(eta, sigma)",
    "log": "dist.Normal(eta.exp(), sigma)",
    "inverse": "dist.Normal(1 / eta, sigma)",
}
SCALES = {"identity": identity_scale, "log": log_scale, "inverse": inverse_scale}


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
