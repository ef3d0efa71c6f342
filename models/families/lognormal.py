"""Log-normal responses: positive amounts or times whose logarithm is Normal."""

from __future__ import annotations

import math

from hierfl.models.families.censored import censored
from hierfl.models.families.default_priors import half_student
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import log_scale
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


def _scale(response: Response) -> tuple[float, float]:
    """Return the mean and sd of log y, for a log-normal y of the response's mean and sd."""
    center, spread = log_scale(response)
    return center - 0.5 * spread**2, spread


def _parameters(response: Response) -> dict[str, Prior]:
    spread = _scale(response)[1]
    return {"sigma": half_student(spread if math.isfinite(spread) else 0.0)}


@recorded
def lognormal() -> ResponseFamily:
    """Return the family of positive responses whose logarithm is Normal, identity link.

        log y ~ Normal(eta, sigma),    sigma ~ half-StudentT(3, 0, max(2.5, sd(log y)))

    exp(eta) is the median of y. The sd of log y is that of a log-normal with the mean and sd of the
    response. As times they may be censored or entered late (`Censored`): the row fields "cens",
    "upper" and "entry".

    >>> lognormal().expression(("cens",))
    'families.Censored(dist.LogNormal(eta, sigma), cens=batch.cens)'
    """
    return ResponseFamily(
        name="lognormal",
        link="identity",
        kind="time",
        likelihood=censored("dist.LogNormal(eta, sigma)"),
        parameters=_parameters,
        scale=_scale,
        additions=("cens", "upper", "entry"),
    )
