"""Binary responses: 0 or 1."""

from __future__ import annotations

from hierfl.models.families.family import ResponseFamily, no_parameters
from hierfl.models.families.links import check_link, unit_scale
from hierfl.program.recipes import recorded

# link -> the log odds of a success
LOGITS = {
    "logit": "eta",
    "probit": "families.probit_logits(eta)",
    "cloglog": "families.cloglog_logits(eta)",
}


@recorded
def bernoulli(link: str = "logit") -> ResponseFamily:
    """Return the family of responses 0 and 1.

        y ~ Bernoulli(link^-1(eta))

    Args:
        link: "logit", "probit" or "cloglog" (log(-log(1 - p))). Default "logit", as in brms.

    Raises:
        ValueError: link is none of these.

    >>> bernoulli().likelihood
    'dist.Bernoulli(logits=eta)'
    """
    check_link(link, [*LOGITS], "bernoulli")
    return ResponseFamily(
        name="bernoulli",
        link=link,
        kind="binary",
        likelihood=f"dist.Bernoulli(logits={LOGITS[link]})",
        parameters=no_parameters,
        scale=unit_scale,
    )
