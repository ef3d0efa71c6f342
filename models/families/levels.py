"""Levels without order or in order: categorical, cumulative, sequential and adjacent; ordered priors."""

import math
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.utils import lazy_property
from torch.nn.functional import logsigmoid

from hierfl.core.arguments import expect
from hierfl.core.gaussians import log1mexp, log_normal_between, log_normal_cdf
from hierfl.models.families.family import Response, ResponseFamily, no_parameters
from hierfl.models.families.links import as_source, check_link, count_of, unit_scale
from hierfl.models.families.rows import RowDistribution
from hierfl.models.priors import Prior
from hierfl.program.sites import recorded


def sratio_logits(eta: Tensor, thresholds: Tensor, link: str = "logit") -> Tensor:
    """Return log probabilities of ordered levels, (..., K), of which each is reached from the one before.

        P(y = k | y >= k) = F(thresholds_k - eta)

    F is the logistic ("logit") or the standard Normal ("probit") distribution function.

    Args:
        eta: linear predictor, (...).
        thresholds: (K - 1,), or (..., K - 1) of each row; in no order.
        link: "logit" or "probit". Default "logit".
    """
    at = thresholds - eta[..., None]
    log_cdf = logsigmoid if link == "logit" else log_normal_cdf
    passed = log_cdf(-at).cumsum(-1)
    reached = torch.nn.functional.pad(passed[..., :-1], (1, 0))
    return torch.cat([log_cdf(at) + reached, passed[..., -1:]], -1)


def acat_logits(eta: Tensor, thresholds: Tensor) -> Tensor:
    """Return log probabilities of ordered levels up to a constant, (..., K).

        log(P(y = k + 1) / P(y = k)) = eta - thresholds_k

    Args:
        eta: linear predictor, (...).
        thresholds: (K - 1,), or (..., K - 1) of each row; in no order.
    """
    return torch.nn.functional.pad((eta[..., None] - thresholds).cumsum(-1), (1, 0))


def _parameters_of_steps(response: Response) -> dict[str, Prior]:
    size = count_of(response, "an ordinal response", "levels") - 1
    return {"thresholds": dist.StudentT(3.0, 0.0, 2.5).expand([size]).to_event(1)}


@recorded
def sratio(link: str = "logit") -> ResponseFamily:
    """Return the family of ordered levels that are reached one after another (continuation ratios).

        P(y = k | y >= k) = link^-1(thresholds_k - eta),    thresholds_k ~ StudentT(3, 0, 2.5)

    The response is a code 0, 1, ..., K - 1. A larger eta makes it more probable to go on to higher
    levels. With these links `cratio` of brms is the same family. Effects may be another at each
    step: `cs(x)` in a formula.

    Args:
        link: "logit" or "probit". Default "logit", as in brms.

    Raises:
        ValueError: link is none of these.

    Reference: Tutz 1990, British Journal of Mathematical and Statistical Psychology 43:39.
    """
    of_link = _argument_of(link, "sratio")
    likelihood = f"dist.Categorical(logits=families.sratio_logits(eta, thresholds{of_link}))"
    return ResponseFamily(
        "sratio", link, "ordered", likelihood, _parameters_of_steps, unit_scale, has_intercept=False
    )


@recorded
def acat() -> ResponseFamily:
    """Return the family of ordered levels by the odds of neighboring ones, logit link.

        P(y = k + 1) / P(y = k) = exp(eta - thresholds_k),    thresholds_k ~ StudentT(3, 0, 2.5)

    The response is a code 0, 1, ..., K - 1. A larger eta makes higher levels more probable. Effects
    may be another at each step: `cs(x)` in a formula.
    """
    likelihood = "dist.Categorical(logits=families.acat_logits(eta, thresholds))"
    return ResponseFamily(
        "acat",
        "logit",
        "ordered",
        likelihood,
        _parameters_of_steps,
        unit_scale,
        has_intercept=False,
    )


def _outputs(response: Response) -> int:
    """Return the number of levels but the first, which is the reference."""
    return count_of(response, "a categorical response", "levels") - 1


@recorded
def categorical() -> ResponseFamily:
    """Return the family of responses in K unordered levels; the first is the reference.

        y ~ Categorical(softmax(0, eta_1, ..., eta_{K - 1}))

    The response is a code 0, 1, ..., K - 1, and the linear predictor has K - 1 columns.
    """
    likelihood = "dist.Categorical(logits=torch.nn.functional.pad(eta, (1, 0)))"
    return ResponseFamily(
        "categorical", "logit", "category", likelihood, no_parameters, unit_scale, outputs=_outputs
    )


class Cumulative(dist.Categorical):
    """Ordered levels, 0 to K - 1: a level's probability reads the two thresholds beside it alone.

        log P(y = k) = log(F(thresholds_k - eta) - F(thresholds_{k - 1} - eta))

    F is the logistic ("logit") or the standard Normal ("probit") distribution function; the lowest
    threshold is -infinity, the highest infinity. All are finite in both tails: dist.OrderedLogistic
    subtracts probabilities, its log densities stop near -16 in single precision, and it computes
    all K at each row.

    Args:
        eta: linear predictor, (...).
        thresholds: (K - 1,), or (..., K - 1) of each row; increasing.
        link: "logit" or "probit". Default "logit".
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def __init__(self, eta: Tensor, thresholds: Tensor, link: str = "logit") -> None:
        self.eta, self.thresholds, self.link = eta, thresholds, link
        self._num_events = thresholds.shape[-1] + 1
        shape = torch.broadcast_shapes(eta.shape, thresholds.shape[:-1])
        Distribution.__init__(self, shape)

    @lazy_property
    def logits(self) -> Tensor:
        """Log probabilities of all levels, (..., K)."""
        at = self.thresholds - self.eta[..., None]
        low, high = at[..., :-1], at[..., 1:]
        ends = self._log_cdf(at[..., :1]), self._log_cdf(-at[..., -1:])
        return torch.cat([ends[0], self._log_between(low, high), ends[1]], -1)

    @lazy_property
    def probs(self) -> Tensor:
        """Probabilities of all levels, (..., K)."""
        return self.logits.exp()

    @property
    def _param(self) -> Tensor:  # type: ignore[override]
        return self.logits

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of levels, (...)."""
        if self._validate_args:
            self._validate_sample(value)
        cuts, level = self.thresholds, value.long()
        # beyond the ends stand numbers that do not count
        cuts = torch.cat([cuts[..., :1] - 1.0, cuts, cuts[..., -1:] + 1.0], -1)
        shape = torch.broadcast_shapes(self.batch_shape, level.shape)
        cuts, level = cuts.expand(*shape, -1), level.expand(shape)[..., None]
        low, high = (cuts.gather(-1, at)[..., 0] - self.eta for at in (level, level + 1))
        between, level = self._log_between(low, high), level[..., 0]
        is_first, is_last = level == 0, level == self._num_events - 1
        ends = torch.where(is_first, self._log_cdf(high), self._log_cdf(-low))
        return torch.where(is_first | is_last, ends, between)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Cumulative":
        """Return the same distribution with a larger batch shape."""
        made = type(self)(self.eta.expand(batch_shape), self.thresholds, self.link)
        made._validate_args = False
        return made

    def _log_cdf(self, x: Tensor) -> Tensor:
        return logsigmoid(x) if self.link == "logit" else log_normal_cdf(x)

    def _log_between(self, low: Tensor, high: Tensor) -> Tensor:
        if self.link == "probit":
            return log_normal_between(low, high)
        # F(b) - F(a) = F(b) F(-a) (1 - exp(a - b))
        return logsigmoid(high) + logsigmoid(-low) + log1mexp(high - low)


def _argument_of(link: str, family: str) -> str:
    """Return the last argument of a likelihood of levels in order, in a program, for a link."""
    check_link(link, ["logit", "probit"], family)
    return "" if link == "logit" else f", '{link}'"


def _parameters(response: Response) -> dict[str, Prior]:
    size = count_of(response, "an ordinal response", "levels") - 1
    return {"thresholds": Ordered(dist.StudentT(3.0, 0.0, 2.5), size)}


@recorded
def cumulative(link: str = "logit") -> ResponseFamily:
    """Return the family of ordered levels (proportional odds), with thresholds as intercept.

        P(y <= k) = link^-1(thresholds_k - eta),    thresholds: ordered draws of StudentT(3, 0, 2.5)

    The response is a code 0, 1, ..., K - 1. A larger eta makes higher levels more probable.

    Args:
        link: "logit" or "probit". Default "logit", as in brms.

    Raises:
        ValueError: link is none of these.
    """
    likelihood = f"families.Cumulative(eta, thresholds{_argument_of(link, 'cumulative')})"
    return ResponseFamily(
        "cumulative", link, "ordered", likelihood, _parameters, unit_scale, has_intercept=False
    )


class Ordered(RowDistribution):
    """The order statistics of independent draws: a prior of thresholds.

        log p(v_1 < ... < v_K) = sum_k log p(v_k) + log K!

    Args:
        base: distribution of one number, of any batch shape.
        size: K, the number of draws, >= 1.

    Raises:
        ValueError: base is no distribution of one real number, or size is below 1.
    """

    FIELDS = ("base",)
    support = constraints.ordered_vector

    def __init__(self, base: TorchDistributionMixin, size: int) -> None:
        fn: Any = base
        if fn.event_shape or fn.support is not constraints.real:
            raise ValueError(f"base is {base}: it must be the distribution of one real number")
        expect(size=(size, "[1, inf)"))
        self.base, self.size = fn, size
        super().__init__(fn.batch_shape, torch.Size((size,)))

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """Whether the base's draws have gradients, which sorting keeps."""
        return bool(self.base.has_rsample)

    def _log_prob(self, value: Tensor) -> Tensor:
        log_probs: Tensor = self.base.log_prob(value.movedim(-1, 0))
        return log_probs.sum(0) + math.lgamma(self.size + 1.0)

    def as_source(self) -> str:
        """Return the expression that makes it."""
        text = f"families.Ordered({as_source(self.base)}, {self.size})"
        return f"{text}.expand({list(self.batch_shape)})" if len(self.batch_shape) else text

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Return sorted draws, (*sample_shape, *batch_shape, K)."""
        drawn: Tensor = self.base.rsample(torch.Size((self.size, *sample_shape)))
        return drawn.movedim(0, -1).sort(-1).values

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return sorted draws without gradients, (*sample_shape, *batch_shape, K)."""
        with torch.no_grad():
            drawn: Tensor = self.base.sample(torch.Size((self.size, *sample_shape)))
            return drawn.movedim(0, -1).sort(-1).values
