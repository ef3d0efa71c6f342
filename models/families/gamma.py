"""Gamma responses: positive amounts with a constant coefficient of variation."""

from __future__ import annotations

from hierfl.models.families.default_priors import shape_prior
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import log_scale
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


def _parameters(response: Response) -> dict[str, Prior]:
    return {"shape": shape_prior()}


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
        name="gamma",
        link="log",
        kind="positive",
        likelihood="dist.Gamma(shape, shape * (-eta).exp())",
        parameters=_parameters,
        scale=log_scale,
    )
