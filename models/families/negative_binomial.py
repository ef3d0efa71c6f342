"""Negative binomial responses: counts with a variance above their mean."""

from __future__ import annotations

from hierfl.models.families.default_priors import shape_prior
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import log_scale
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


def _parameters(response: Response) -> dict[str, Prior]:
    return {"shape": shape_prior()}


@recorded
def negative_binomial() -> ResponseFamily:
    """Return the family of overdispersed counts with mean exp(eta), log link.

        y ~ NegativeBinomial(mean exp(eta), shape),    var(y) = exp(eta) + exp(2 eta) / shape
        shape ~ InverseGamma(0.4, 0.3)

    The larger the shape, the closer to a Poisson.

    >>> negative_binomial().likelihood
    'dist.NegativeBinomial(shape, logits=eta - shape.log())'
    """
    return ResponseFamily(
        name="negative_binomial",
        link="log",
        kind="count",
        likelihood="dist.NegativeBinomial(shape, logits=eta - shape.log())",
        parameters=_parameters,
        scale=log_scale,
    )
