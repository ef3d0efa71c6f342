"""Zero-inflated Poisson responses: counts with more zeros than a Poisson has."""

from __future__ import annotations

import pyro.distributions as dist

from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import log_scale
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


def _parameters(response: Response) -> dict[str, Prior]:
    return {"zi": dist.Beta(1.0, 1.0)}


@recorded
def zero_inflated_poisson() -> ResponseFamily:
    """Return the family of counts that are 0 with probability zi, and else Poisson, log link.

        y = 0 with probability zi, else y ~ Poisson(exp(eta)),    zi ~ Beta(1, 1)

    The mean of y is (1 - zi) exp(eta).

    >>> zero_inflated_poisson().likelihood
    'dist.ZeroInflatedPoisson(eta.exp(), gate=zi)'
    """
    return ResponseFamily(
        name="zero_inflated_poisson",
        link="log",
        kind="count",
        likelihood="dist.ZeroInflatedPoisson(eta.exp(), gate=zi)",
        parameters=_parameters,
        scale=log_scale,
    )
