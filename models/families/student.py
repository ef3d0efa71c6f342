"""Student t responses: real numbers with outliers."""

from __future__ import annotations

import pyro.distributions as dist

from hierfl.models.families.default_priors import half_student
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import identity_scale
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


def _parameters(response: Response) -> dict[str, Prior]:
    return {"sigma": half_student(response.sd), "nu": dist.Gamma(2.0, 0.1)}


@recorded
def student() -> ResponseFamily:
    """Return the family of real responses with a Student t distribution, identity link.

        y ~ StudentT(nu, eta, sigma)
        sigma ~ half-StudentT(3, 0, max(2.5, sd(y))),    nu ~ Gamma(2, 0.1)

    brms truncates the prior of nu at 1; here it is not truncated, and has 0.5 % of its mass below
    1.

    >>> student().likelihood
    'dist.StudentT(nu, eta, sigma)'
    """
    return ResponseFamily(
        name="student",
        link="identity",
        kind="real",
        likelihood="dist.StudentT(nu, eta, sigma)",
        parameters=_parameters,
        scale=identity_scale,
    )
