"""Gaussian responses: real numbers with constant variance."""

from __future__ import annotations

from hierfl.models.families.default_priors import half_student
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import check_link, identity_scale, inverse_scale, log_scale
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded

LIKELIHOODS = {
    "identity": "dist.Normal(eta, sigma)",
    "log": "dist.Normal(eta.exp(), sigma)",
    "inverse": "dist.Normal(1 / eta, sigma)",
}
SCALES = {"identity": identity_scale, "log": log_scale, "inverse": inverse_scale}


def _parameters(response: Response) -> dict[str, Prior]:
    return {"sigma": half_student(response.sd)}


@recorded
def gaussian(link: str = "identity") -> ResponseFamily:
    """Return the family of real responses with a Normal distribution.

        y ~ Normal(link^-1(eta), sigma),    sigma ~ half-StudentT(3, 0, max(2.5, sd(y)))

    Args:
        link: "identity", "log" or "inverse". Default "identity", as in brms.

    Raises:
        ValueError: link is none of these.

    >>> gaussian().likelihood
    'dist.Normal(eta, sigma)'
    """
    check_link(link, [*LIKELIHOODS], "gaussian")
    return ResponseFamily(
        name="gaussian",
        link=link,
        kind="real",
        likelihood=LIKELIHOODS[link],
        parameters=_parameters,
        scale=SCALES[link],
    )
