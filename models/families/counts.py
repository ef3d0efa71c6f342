"""Counts: Poisson and negative binomial, also with more zeros; successes, alone or among trials."""

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hierfl.models.families.family import ABOVE_ZERO, ResponseFamily, no_parameters
from hierfl.models.families.links import a_shape, a_share, check_link, log_scale, priors, unit_scale
from hierfl.program.sites import recorded

LARGE = 30.0  # from here on Stirling's series is exact to 1e-12
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
        likelihood="families.BetaBinomial(eta.sigmoid() * phi, (-eta).sigmoid() * phi, batch.trials)",
        parameters=priors(phi=a_shape),
        scale=unit_scale,
        additions=("trials",),
        required=("trials",),
    )


@recorded
def poisson() -> ResponseFamily:
    """Return the family of counts with a Poisson distribution, log link.

    y ~ Poisson(exp(eta))
    """
    return ResponseFamily(
        "poisson", "log", "count", "dist.Poisson(eta.exp())", no_parameters, log_scale
    )


class NegativeBinomial(dist.NegativeBinomial):  # type: ignore[misc]  # Any in Pyro
    """dist.NegativeBinomial whose log probability is exact for large shapes in float32 too."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of counts, in nats, of the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        ways = log_rising(self.total_count, value) - torch.lgamma(value + 1.0)
        successes: Tensor = value * logsigmoid(self.logits)
        return ways + successes + self.total_count * logsigmoid(-self.logits)


@recorded
def negative_binomial() -> ResponseFamily:
    """Return the family of overdispersed counts with mean exp(eta), log link.

        y ~ NegativeBinomial(mean exp(eta), shape),    var(y) = exp(eta) + exp(2 eta) / shape
        shape ~ InverseGamma(0.4, 0.3)

    The larger the shape, the closer to a Poisson.
    """
    likelihood = "families.NegativeBinomial(shape, logits=eta - shape.log())"
    return ResponseFamily(
        "negative_binomial", "log", "count", likelihood, priors(shape=a_shape), log_scale
    )


@recorded
def zero_inflated_poisson() -> ResponseFamily:
    """Return the family of counts that are 0 with probability zi, and else Poisson, log link.

        y = 0 with probability zi, else y ~ Poisson(exp(eta)),    zi ~ Beta(1, 1)

    The mean of y is (1 - zi) exp(eta).
    """
    likelihood = "dist.ZeroInflatedPoisson(eta.exp(), gate=zi)"
    of, parameters = ("zero_inflated_poisson", "log", "count", likelihood), priors(zi=a_share)
    return ResponseFamily(*of, parameters, log_scale, edges=ABOVE_ZERO)


@recorded
def zero_inflated_negative_binomial() -> ResponseFamily:
    """Return the family of counts that are 0 with probability zi, and else negative binomial.

        y = 0 with probability zi, else y ~ NegativeBinomial(mean exp(eta), shape)
        zi ~ Beta(1, 1),    shape ~ InverseGamma(0.4, 0.3)

    The link is log, and the mean of y is (1 - zi) exp(eta).
    """
    base = "families.NegativeBinomial(shape, logits=eta - shape.log())"
    return ResponseFamily(
        "zero_inflated_negative_binomial",
        "log",
        "count",
        f"dist.ZeroInflatedDistribution({base}, gate=zi)",
        priors(shape=a_shape, zi=a_share),
        log_scale,
        edges=ABOVE_ZERO,
    )


def log_rising(start: Tensor, steps: Tensor) -> Tensor:
    """Return log(Gamma(start + steps) / Gamma(start)), where two lgamma of 10,000 are off by 0.01."""
    start, steps = torch.broadcast_tensors(start, steps.to(start.dtype))
    large = start > LARGE
    small = torch.where(large, torch.ones_like(start), start)
    by_gamma = torch.lgamma(small + steps) - torch.lgamma(small)
    many = torch.where(large, start, torch.full_like(start, LARGE))
    end = many + steps
    by_series = (
        (many - 0.5) * torch.log1p(steps / many)
        + steps * (end.log() - 1.0)
        + _correction(end)
        - _correction(many)
    )
    return torch.where(large, by_series, by_gamma)


def _correction(x: Tensor) -> Tensor:
    """Return what Stirling's formula of log Gamma(x) lacks."""
    inverse = 1.0 / x
    square = inverse**2
    return inverse * (
        1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0 - square / 1680.0))
    )
