"""Weibull times: a hazard that rises or falls as a power of time."""

from __future__ import annotations

from hierfl.models.families.censored import censored
from hierfl.models.families.default_priors import shape_prior
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import log_scale
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


def _parameters(response: Response) -> dict[str, Prior]:
    return {"shape": shape_prior()}


@recorded
def weibull() -> ResponseFamily:
    """Return the family of times with a Weibull distribution of mean exp(eta), log link.

        y ~ Weibull(scale exp(eta) / Gamma(1 + 1 / shape), shape),    shape ~ InverseGamma(0.4, 0.3)

    The parametrisation by the mean is that of brms. Times may be censored or entered late (`Censored`): the
    row fields "cens", "upper" and "entry".

    >>> weibull().expression()
    'dist.Weibull((eta - torch.lgamma(1 + 1 / shape)).exp(), shape)'
    """
    return ResponseFamily(
        name="weibull",
        link="log",
        kind="time",
        likelihood=censored("dist.Weibull((eta - torch.lgamma(1 + 1 / shape)).exp(), shape)"),
        parameters=_parameters,
        scale=log_scale,
        additions=("cens", "upper", "entry"),
    )
