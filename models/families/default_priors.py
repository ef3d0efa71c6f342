"""Default priors of the families' parameters: brms's, if these are proper and can be sampled."""

from __future__ import annotations

import pyro.distributions as dist

from hierfl.models.priors import Prior

LEAST_SCALE = 2.5  # of brms's Student t priors of intercepts and standard deviations


def intercept_prior(center: float, spread: float, unit: float = 1.0) -> dist.StudentT:
    """Return StudentT(3, center, max(2.5 unit, spread)), brms's default prior of an intercept.

    brms takes the median and the median absolute deviation of the response; here it is the mean and
    the standard deviation, which sums over clients give. brms's least scale of 2.5 is in no unit,
    so that there a response in other units has another prior.

    Args:
        center: of the response on the scale of the linear predictor.
        spread: of the response on that scale.
        unit: of that scale. Default 1: it has none, as that of a logit. A response in units of its
            own has its standard deviation; 0, of a constant response, counts as 1.

    Reference: `set_prior` of brms, section "Population-level effects".
    """
    return dist.StudentT(3.0, center, max(LEAST_SCALE * (unit or 1.0), spread))


def half_student(spread: float, unit: float = 1.0) -> dist.FoldedDistribution:
    """Return half-StudentT(3, 0, max(2.5 unit, spread)), brms's default for standard deviations.

    Args:
        spread: of the response on the scale of the linear predictor.
        unit: as in `intercept_prior`.
    """
    return dist.FoldedDistribution(
        dist.StudentT(3.0, 0.0, max(LEAST_SCALE * (unit or 1.0), spread))
    )


def shape_prior() -> dist.InverseGamma:
    """Return InverseGamma(0.4, 0.3), the prior of a shape or precision.

    It is brms's default for the shape of a negative binomial (since issue 1614 of brms; A. Vehtari,
    "Default prior for negative-binomial shape parameter", 2024). For the other shapes and
    precisions brms has Gamma(0.01, 0.01), from which nobody can simulate: 40 % of its draws are
    below 1e-40, where responses are 0 or infinite in single precision. InverseGamma(0.4, 0.3) is as
    wide upwards, has its mode at 0.2, and vanishes at 0.
    """
    return dist.InverseGamma(0.4, 0.3)


def phi(response: object) -> dict[str, Prior]:
    """Return the prior of a precision."""
    return {"phi": shape_prior()}


def shape(response: object) -> dict[str, Prior]:
    """Return the prior of a shape."""
    return {"shape": shape_prior()}
