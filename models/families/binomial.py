"""Binomial responses: successes among trials."""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hierfl.models.families.bernoulli import LOGITS
from hierfl.models.families.family import ResponseFamily, no_parameters
from hierfl.models.families.links import check_link, unit_scale
from hierfl.program.recipes import recorded


class Binomial(dist.Binomial):
    """dist.Binomial with the right second derivative at log odds of 0, where torch's is 0."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability in nats, of the batch shape.

        Args:
            value: successes.
        """
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

    >>> binomial().likelihood
    'families.Binomial(batch.trials, logits=eta)'
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
