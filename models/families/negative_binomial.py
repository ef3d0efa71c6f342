"""Negative binomial responses: counts with a variance above their mean."""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hierfl.models.families.default_priors import shape_prior
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import log_scale
from hierfl.models.families.rising import log_rising
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


class NegativeBinomial(dist.NegativeBinomial):  # type: ignore[misc]  # Any in Pyro
    """dist.NegativeBinomial whose log probability is exact for large shapes in float32 too."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability in nats, of the batch shape.

        Args:
            value: counts.
        """
        if self._validate_args:
            self._validate_sample(value)
        ways = log_rising(self.total_count, value) - torch.lgamma(value + 1.0)
        successes: Tensor = value * logsigmoid(self.logits)
        return ways + successes + self.total_count * logsigmoid(-self.logits)


def _parameters(response: Response) -> dict[str, Prior]:
    return {"shape": shape_prior()}


@recorded
def negative_binomial() -> ResponseFamily:
    """Return the family of overdispersed counts with mean exp(eta), log link.

        y ~ NegativeBinomial(mean exp(eta), shape),    var(y) = exp(eta) + exp(2 eta) / shape
        shape ~ InverseGamma(0.4, 0.3)

    The larger the shape, the closer to a Poisson.

    >>> negative_binomial().likelihood
    'families.NegativeBinomial(shape, logits=eta - shape.log())'
    """
    return ResponseFamily(
        name="negative_binomial",
        link="log",
        kind="count",
        likelihood="families.NegativeBinomial(shape, logits=eta - shape.log())",
        parameters=_parameters,
        scale=log_scale,
    )
