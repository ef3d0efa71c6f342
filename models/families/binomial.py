"""Binomial responses: successes among trials."""

from __future__ import annotations

from hierfl.models.families.bernoulli import LOGITS
from hierfl.models.families.family import ResponseFamily, no_parameters
from hierfl.models.families.links import check_link, unit_scale
from hierfl.program.recipes import recorded


@recorded
def binomial(link: str = "logit") -> ResponseFamily:
    """Return the family of successes among trials, the row field "trials".

        y ~ Binomial(trials, link^-1(eta))

    Args:
        link: "logit", "probit" or "cloglog" (log(-log(1 - p))). Default "logit", as in brms.

    Raises:
        ValueError: link is none of these.

    >>> binomial().likelihood
    'dist.Binomial(batch.trials, logits=eta)'
    """
    check_link(link, [*LOGITS], "binomial")
    return ResponseFamily(
        name="binomial",
        link=link,
        kind="count",
        likelihood=f"dist.Binomial(batch.trials, logits={LOGITS[link]})",
        parameters=no_parameters,
        scale=unit_scale,
        additions=("trials",),
        required=("trials",),
    )
