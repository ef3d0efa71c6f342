"""Times: exponential, Weibull and log-normal responses."""

from __future__ import annotations

import math

import pyro.distributions as dist
from torch import Tensor

from hierfl.models.families.family import Response, ResponseFamily, no_parameters
from hierfl.models.families.links import half_student, log_scale, priors
from hierfl.models.families.survival import hazards, of_times
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


@recorded
def exponential() -> ResponseFamily:
    """Return the family of times with a constant hazard and mean exp(eta), log link.

        y ~ Exponential(rate exp(-eta))

    Times may be censored or entered late (`Censored`): the row fields "cens", "upper" and "entry".
    """
    base = "dist.Exponential((-eta).exp())"
    return of_times("exponential", "log", base, no_parameters, log_scale)


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


@recorded
def weibull() -> ResponseFamily:
    """Return the family of times with a Weibull distribution of mean exp(eta), log link.

        y ~ Weibull(exp(eta) / Gamma(1 + 1 / shape), shape),    shape ~ LogNormal(0, 1)

    The parametrization by the mean is that of brms. Its default prior of the shape, Gamma(0.01,
    0.01), allows shapes of thousands, under which all times are equal; here the hazard is as likely
    to rise as to fall, and nine of ten shapes lie between 0.2 and 5. Times may be censored or
    entered late (`Censored`): the row fields "cens", "upper" and "entry".
    """
    base = "families.Weibull((eta - torch.lgamma(1 + 1 / shape)).exp(), shape)"
    return of_times(
        "weibull", "log", base, priors(shape=lambda response: dist.LogNormal(0.0, 1.0)), log_scale
    )


def _lognormal_scale(response: Response) -> tuple[float, float]:
    """Return the mean and sd of log y, for a log-normal y of the response's mean and sd."""
    center, spread = log_scale(response)
    return center - 0.5 * spread**2, spread


def _sigma_of_logs(response: Response) -> Prior:
    spread = _lognormal_scale(response)[1]
    return half_student(spread if math.isfinite(spread) else 0.0)


@recorded
def lognormal() -> ResponseFamily:
    """Return the family of positive responses whose logarithm is Normal, identity link.

        log y ~ Normal(eta, sigma),    sigma ~ half-StudentT(3, 0, max(2.5, sd(log y)))

    exp(eta) is the median of y. The sd of log y is that of a log-normal with the mean and sd of the
    response. As times they may be censored or entered late (`Censored`): the row fields "cens",
    "upper" and "entry".
    """
    base = "dist.LogNormal(eta, sigma)"
    return of_times("lognormal", "identity", base, priors(sigma=_sigma_of_logs), _lognormal_scale)
