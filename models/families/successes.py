"""Successes, alone or among trials: Bernoulli, binomial and beta-binomial responses."""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hierfl.models.families.counts import log_rising
from hierfl.models.families.family import ResponseFamily, no_parameters
from hierfl.models.families.links import a_shape, check_link, priors, unit_scale
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
    """
    check_link(link, [*LOGITS], "bernoulli")
    likelihood = f"dist.Bernoulli(logits={LOGITS[link]})"
    return ResponseFamily("bernoulli", link, "binary", likelihood, no_parameters, unit_scale)


class Binomial(dist.Binomial):
    """dist.Binomial with the right second derivative at log odds of 0, where torch's is 0."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of successes, in nats, of the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        n = self.total_count
        ways = torch.lgamma(n + 1.0) - torch.lgamma(value + 1.0) - torch.lgamma(n - value + 1.0)
        return ways + value * logsigmoid(self.logits) + (n - value) * logsigmoid(-self.logits)


@recorded
def binomial(link: str = "logit") -> ResponseFamily:
    """Return the family of successes among trials, the row field "trials".

        y ~ Binomial(trials, link^-1(eta))

    Args:
        link: "logit", "probit" or "cloglog" (log(-log(1 - p))). Default "logit", as in brms.

    Raises:
        ValueError: link is none of these.
    """
    check_link(link, [*LOGITS], "binomial")
    return ResponseFamily(
        name="binomial",
        link=link,
        kind="count",
        likelihood=f"families.Binomial(batch.trials, logits={LOGITS[link]})",
        parameters=no_parameters,
        scale=unit_scale,
        additions=("trials",),
        required=("trials",),
    )


class BetaBinomial(dist.BetaBinomial):
    """dist.BetaBinomial whose log probability is exact for large precisions in float32 too."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of successes, in nats, of the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        a, b, n = self.concentration1, self.concentration0, self.total_count
        ways = torch.lgamma(n + 1.0) - torch.lgamma(value + 1.0) - torch.lgamma(n - value + 1.0)
        rising: Tensor = log_rising(a, value) + log_rising(b, n - value)
        return ways + rising - log_rising(a + b, n)


@recorded
def beta_binomial() -> ResponseFamily:
    """Return the family of overdispersed successes among trials (a row field), logit link.

        y ~ BetaBinomial(p phi, (1 - p) phi, trials),    p = logit^-1(eta)
        phi ~ InverseGamma(0.4, 0.3)

    The larger phi, the closer to a binomial.
    """
    return ResponseFamily(
        name="beta_binomial",
        link="logit",
        kind="count",
        likelihood=(
            "families.BetaBinomial(eta.sigmoid() * phi, (-eta).sigmoid() * phi, batch.trials)"
        ),
        parameters=priors(phi=a_shape),
        scale=unit_scale,
        additions=("trials",),
        required=("trials",),
    )
