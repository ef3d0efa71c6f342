"""Amounts and counts of which some are 0 by a process of their own: hurdle responses."""

from typing import Any

import torch
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import Distribution

from hierfl.core.gaussians import log1mexp
from hierfl.models.families.family import ABOVE_ZERO, ResponseFamily
from hierfl.models.families.links import a_shape, a_share, half_student, log_scale, priors
from hierfl.models.families.rows import RowDistribution
from hierfl.program.sites import recorded


class Hurdle(RowDistribution):
    """0 with probability hu, and else a draw of another distribution that is above 0.

        p(0) = hu,    p(y) = (1 - hu) p_base(y) / (1 - p_base(0)) for y > 0

    Args:
        base: distribution of positive amounts; or dist.Poisson or dist.NegativeBinomial, of which
            the part above 0 is taken.
        hu: probability of 0, of the base's batch shape or one that it can be expanded to.
    """

    FIELDS = ("base", "hu")

    def __init__(self, base: Distribution, hu: Tensor) -> None:
        fn: Any = base
        shape = torch.broadcast_shapes(fn.batch_shape, torch.as_tensor(hu).shape)
        self.base = fn if fn.batch_shape == shape else fn.expand(shape)
        self.hu = torch.as_tensor(hu).expand(shape)
        super().__init__(shape, torch.Size())

    @property
    def is_count(self) -> bool:
        """Whether the base is one of counts."""
        return bool(self.base.support.is_discrete)

    @property
    def support(self) -> Any:
        """Counts, or numbers of 0 or more."""
        return constraints.nonnegative_integer if self.is_count else constraints.nonnegative

    @property
    def log_above(self) -> Tensor | float:
        """The log probability of the base above 0."""
        return log1mexp(-self.base.log_prob(torch.zeros_like(self.hu))) if self.is_count else 0.0

    def _log_prob(self, value: Tensor) -> Tensor:
        is_zero = value == 0
        positive = torch.where(is_zero, torch.ones_like(value), value)  # its gradient is finite
        above = torch.log1p(-self.hu) + self.base.log_prob(positive) - self.log_above
        return torch.where(is_zero, self.hu.log().expand_as(above), above)

    def _moment(self, of_base: Tensor) -> Tensor:
        above = self.log_above
        return (1.0 - self.hu) * (of_base / above.exp() if isinstance(above, Tensor) else of_base)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance, zeros among the values."""
        mean, square = self._moment(self.base.mean), self.base.variance + self.base.mean**2
        return mean, self._moment(square) - mean**2

    def _draw(self) -> Tensor:
        value: Tensor = self._positive() if self.is_count else self.base.sample()
        return torch.where(torch.rand_like(self.hu) < self.hu, torch.zeros_like(value), value)

    def _positive(self) -> Tensor:
        """Return counts above 0: of a Poisson process on (0, 1) the first event, and those after it.

        A negative binomial is a Poisson number of logarithmic counts, which are drawn as by Kemp
        1981, Applied Statistics 30:249.
        """
        base = self.base
        passed = -torch.log1p(
            torch.rand_like(base.mean) * torch.expm1(base.log_prob(0 * base.mean))
        )
        if isinstance(base, torch.distributions.Poisson):
            return 1.0 + torch.poisson(base.rate - passed)
        rate = base.total_count * torch.nn.functional.softplus(base.logits)
        remaining = base.total_count * (1.0 - passed / rate)
        failure = torch.nn.functional.softplus(base.logits) * torch.rand_like(rate)
        first = 1.0 + (torch.rand_like(rate).log() / log1mexp(failure)).floor()
        return first + torch.distributions.NegativeBinomial(remaining, logits=base.logits).sample()


@recorded
def hurdle_poisson() -> ResponseFamily:
    """Return the family of counts that are 0 with probability hu, and else Poisson above 0, log link.

        y = 0 with probability hu, else y ~ Poisson(exp(eta)) given y > 0,    hu ~ Beta(1, 1)

    The mean of y is (1 - hu) exp(eta) / (1 - exp(-exp(eta))).
    """
    likelihood = "families.Hurdle(dist.Poisson(eta.exp()), hu)"
    of, parameters = ("hurdle_poisson", "log", "count", likelihood), priors(hu=a_share)
    return ResponseFamily(*of, parameters, log_scale, edges=ABOVE_ZERO)


@recorded
def hurdle_negative_binomial() -> ResponseFamily:
    """Return the family of counts that are 0 with probability hu, and else negative binomial above 0.

        y = 0 with probability hu, else y ~ NegativeBinomial(mean exp(eta), shape) given y > 0
        hu ~ Beta(1, 1),    shape ~ InverseGamma(0.4, 0.3)

    The link is log.
    """
    base = "families.NegativeBinomial(shape, logits=eta - shape.log())"
    return ResponseFamily(
        "hurdle_negative_binomial",
        "log",
        "count",
        f"families.Hurdle({base}, hu)",
        priors(shape=a_shape, hu=a_share),
        log_scale,
        edges=ABOVE_ZERO,
    )


@recorded
def hurdle_gamma() -> ResponseFamily:
    """Return the family of amounts that are 0 with probability hu, and else Gamma of mean exp(eta).

        y = 0 with probability hu, else y ~ Gamma(shape, shape / exp(eta))
        hu ~ Beta(1, 1),    shape ~ InverseGamma(0.4, 0.3)

    The link is log, and the mean of y is (1 - hu) exp(eta).
    """
    likelihood = "families.Hurdle(dist.Gamma(shape, shape * (-eta).exp()), hu)"
    parameters = priors(shape=a_shape, hu=a_share)
    of = "hurdle_gamma", "log", "amount", likelihood
    return ResponseFamily(*of, parameters, log_scale, edges=ABOVE_ZERO)


@recorded
def hurdle_lognormal() -> ResponseFamily:
    """Return the family of amounts that are 0 with probability hu, and else log-normal.

        y = 0 with probability hu, else log(y) ~ Normal(eta, sigma)
        hu ~ Beta(1, 1),    sigma ~ half-StudentT(3, 0, max(2.5, spread of log y))

    The mean of y is (1 - hu) exp(eta + sigma^2 / 2).
    """
    likelihood = "families.Hurdle(dist.LogNormal(eta, sigma), hu)"
    parameters = priors(sigma=lambda y: half_student(log_scale(y)[1]), hu=a_share)
    of = "hurdle_lognormal", "identity", "amount", likelihood
    return ResponseFamily(*of, parameters, log_scale, edges=ABOVE_ZERO)
