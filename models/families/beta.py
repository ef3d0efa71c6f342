"""Beta responses: shares strictly between 0 and 1."""

from __future__ import annotations

from hierfl.models.families.default_priors import shape_prior
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import unit_scale
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


def _parameters(response: Response) -> dict[str, Prior]:
    return {"phi": shape_prior()}


@recorded
def beta() -> ResponseFamily:
    """Return the family of shares with mean logit^-1(eta) and precision phi, logit link.

        y ~ Beta(p phi, (1 - p) phi),    var(y) = p (1 - p) / (1 + phi)
        phi ~ InverseGamma(0.4, 0.3)

    >>> beta().likelihood
    'dist.Beta(eta.sigmoid() * phi, (-eta).sigmoid() * phi)'
    """
    return ResponseFamily(
        name="beta",
        link="logit",
        kind="unit",
        likelihood="dist.Beta(eta.sigmoid() * phi, (-eta).sigmoid() * phi)",
        parameters=_parameters,
        scale=unit_scale,
    )
