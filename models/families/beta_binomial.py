"""Beta-binomial responses: successes among trials whose probability varies between rows."""

from __future__ import annotations

from hierfl.models.families.default_priors import shape_prior
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import unit_scale
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


def _parameters(response: Response) -> dict[str, Prior]:
    return {"phi": shape_prior()}


@recorded
def beta_binomial() -> ResponseFamily:
    """Return the family of overdispersed successes among trials, the row field "trials", logit link.

        y ~ BetaBinomial(p phi, (1 - p) phi, trials),    p = logit^-1(eta),  phi ~ InverseGamma(0.4, 0.3)

    The larger phi, the closer to a binomial.

    >>> beta_binomial().required
    ('trials',)
    """
    return ResponseFamily(
        name="beta_binomial",
        link="logit",
        kind="count",
        likelihood="dist.BetaBinomial(eta.sigmoid() * phi, (-eta).sigmoid() * phi, batch.trials)",
        parameters=_parameters,
        scale=unit_scale,
        additions=("trials",),
        required=("trials",),
    )
