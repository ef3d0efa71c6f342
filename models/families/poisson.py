"""Counts with a variance equal to their mean."""

from __future__ import annotations

from hierfl.models.families.family import ResponseFamily, no_parameters
from hierfl.models.families.links import log_scale
from hierfl.program.recipes import recorded


@recorded
def poisson() -> ResponseFamily:
    """Return the family of counts with a Poisson distribution, log link.

        y ~ Poisson(exp(eta))

    >>> poisson().likelihood
    'dist.Poisson(eta.exp())'
    """
    return ResponseFamily(
        name="poisson",
        link="log",
        kind="count",
        likelihood="dist.Poisson(eta.exp())",
        parameters=no_parameters,
        scale=log_scale,
    )
