"""Weibull times: a hazard that rises or falls as a power of time."""

from __future__ import annotations

import pyro.distributions as dist
from torch import Tensor

from hierfl.models.families.censored import censored
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import log_scale
from hierfl.models.families.survival import hazards
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


class Weibull(dist.Weibull):  # type: ignore[misc]  # Any in Pyro
    """dist.Weibull with a log density that stays finite where (t / scale)^shape underflows."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density in nats, of the batch shape.

        Args:
            value: times > 0.
        """
        if self._validate_args:
            self._validate_sample(value)
        return hazards(self).log_density(value)


def _parameters(response: Response) -> dict[str, Prior]:
    return {"shape": dist.LogNormal(0.0, 1.0)}


@recorded
def weibull() -> ResponseFamily:
    """Return the family of times with a Weibull distribution of mean exp(eta), log link.

        y ~ Weibull(exp(eta) / Gamma(1 + 1 / shape), shape),    shape ~ LogNormal(0, 1)

    The parametrization by the mean is that of brms. Its default prior of the shape, Gamma(0.01,
    0.01), allows shapes of thousands, under which all times are equal; here the hazard is as likely
    to rise as to fall, and nine of ten shapes lie between 0.2 and 5. Times may be censored or
    entered late (`Censored`): the row fields "cens", "upper" and "entry".

    >>> weibull().expression()
    'families.Weibull((eta - torch.lgamma(1 + 1 / shape)).exp(), shape)'
    """
    return ResponseFamily(
        name="weibull",
        link="log",
        kind="time",
        likelihood=censored("families.Weibull((eta - torch.lgamma(1 + 1 / shape)).exp(), shape)"),
        parameters=_parameters,
        scale=log_scale,
        additions=("cens", "upper", "entry"),
    )
