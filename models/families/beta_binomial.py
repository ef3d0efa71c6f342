"""Beta-binomial responses: successes among trials whose probability varies between rows."""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.models.families.default_priors import shape_prior
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import unit_scale
from hierfl.models.families.rising import log_rising
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


class BetaBinomial(dist.BetaBinomial):
    """dist.BetaBinomial whose log probability is exact for large precisions in float32 too."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability in nats, of the batch shape.

        Args:
            value: successes.
        """
        if self._validate_args:
            self._validate_sample(value)
        a, b, n = self.concentration1, self.concentration0, self.total_count
        ways = torch.lgamma(n + 1.0) - torch.lgamma(value + 1.0) - torch.lgamma(n - value + 1.0)
        both: Tensor = log_rising(a, value) + log_rising(b, n - value)
        return ways + both - log_rising(a + b, n)


def _parameters(response: Response) -> dict[str, Prior]:
    return {"phi": shape_prior()}


@recorded
def beta_binomial() -> ResponseFamily:
    """Return the family of overdispersed successes among trials (a row field), logit link.

        y ~ BetaBinomial(p phi, (1 - p) phi, trials),    p = logit^-1(eta)
        phi ~ InverseGamma(0.4, 0.3)

    The larger phi, the closer to a binomial.

    >>> beta_binomial().required
    ('trials',)
    """
    return ResponseFamily(
        name="beta_binomial",
        link="logit",
        kind="count",
        likelihood=(
            "families.BetaBinomial(eta.sigmoid() * phi, (-eta).sigmoid() * phi, batch.trials)"
        ),
        parameters=_parameters,
        scale=unit_scale,
        additions=("trials",),
        required=("trials",),
    )
