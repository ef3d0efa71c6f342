"""Parts of a whole: multinomial and Dirichlet responses, and shares of which some are exactly 0 or 1."""

from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor
from torch.nn.functional import logsigmoid

from hierfl.core.gaussians import log1mexp
from hierfl.models.families.family import ABOVE_ZERO, Response, ResponseFamily, no_parameters
from hierfl.models.families.levels import Ordered
from hierfl.models.families.links import a_shape, count_of, priors, unit_scale
from hierfl.models.families.rows import RowDistribution
from hierfl.program.sites import recorded


class OrderedBeta(RowDistribution):
    """Shares from 0 to 1, both of which have a probability (Kubinec 2023, Political Analysis 31:519).

        P(0) = 1 - F(eta - c_1),    P(1) = F(eta - c_2),    F(x) = 1 / (1 + exp(-x))
        y ~ Beta(F(eta) phi, (1 - F(eta)) phi) between them, with probability 1 - P(0) - P(1)

    Args:
        eta: linear predictor, of the batch shape.
        thresholds: c_1 < c_2, (..., 2).
        phi: precision of the shares between 0 and 1.
    """

    FIELDS = ("eta", "low", "high", "phi")
    support = constraints.unit_interval

    def __init__(self, eta: Tensor, thresholds: Tensor, phi: Tensor) -> None:
        low, high = thresholds[..., 0], thresholds[..., 1]
        self.eta, self.low, self.high, self.phi = torch.broadcast_tensors(eta, low, high, phi)
        super().__init__(self.eta.shape, torch.Size())

    @property
    def between(self) -> Any:
        """The distribution of shares between 0 and 1."""
        return dist.Beta(self.eta.sigmoid() * self.phi, (-self.eta).sigmoid() * self.phi)

    @property
    def logits(self) -> Tensor:
        """The log probabilities of 0, of 1, and of a share between them, (..., 3)."""
        inside = logsigmoid(self.eta - self.low) + logsigmoid(self.high - self.eta)
        inside = inside + log1mexp(self.high - self.low)
        ends = logsigmoid(self.low - self.eta), logsigmoid(self.eta - self.high)
        return torch.stack([*ends, inside], -1)

    def _log_prob(self, value: Tensor) -> Tensor:
        at_zero, at_one, inside = self.logits.unbind(-1)
        at_end = (value == 0) | (value == 1)
        safe = torch.where(at_end, torch.full_like(value, 0.5), value)  # its gradient is finite
        density = inside + self.between.log_prob(safe)
        return torch.where(at_end, torch.where(value == 0, at_zero, at_one), density)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance, zeros and ones among the values."""
        _, at_one, inside = self.logits.exp().unbind(-1)
        mean = at_one + inside * self.eta.sigmoid()
        square = self.between.variance + self.between.mean**2
        return mean, at_one + inside * square - mean**2

    def _draw(self) -> Tensor:
        value: Tensor = self.between.sample()
        at_zero, at_one, _ = self.logits.exp().unbind(-1)
        uniform = torch.rand_like(value)
        value = torch.where(uniform < at_zero, torch.zeros_like(value), value)
        return torch.where(uniform > 1.0 - at_one, torch.ones_like(value), value)


@recorded
def ordered_beta() -> ResponseFamily:
    """Return the family of shares from 0 to 1, both included, logit link.

        P(0) = 1 - F(eta - c_1),    P(1) = F(eta - c_2),    F the logistic function
        y ~ Beta(F(eta) phi, (1 - F(eta)) phi) between them
        phi ~ InverseGamma(0.4, 0.3),    c: two ordered draws of StudentT(3, 0, 2.5)

    A larger eta makes larger shares, and ones, more probable. Kubinec 2023, Political Analysis
    31:519, has an induced Dirichlet prior of the thresholds c instead.
    """
    parameters = priors(
        phi=a_shape, thresholds=lambda response: Ordered(dist.StudentT(3.0, 0.0, 2.5), 2)
    )
    likelihood = "families.OrderedBeta(eta, thresholds, phi)"
    of, edges = ("ordered_beta", "logit", "share", likelihood), (*ABOVE_ZERO, 1.0)
    return ResponseFamily(*of, parameters, unit_scale, edges=edges)


class Dirichlet(dist.Dirichlet):
    """dist.Dirichlet that leaves it to `ResponseFamily.check` whether shares add up to one.

    Rows that are not there have one number in place of all values, of which no sum is one.
    """

    support: Any = constraints.independent(constraints.unit_interval, 1)


class Multinomial(RowDistribution):
    """Counts of K categories, whose sum may be another in each row.

    Args:
        total_count: the sum, of the batch shape.
        logits: log probabilities up to a constant, (..., K).
    """

    FIELDS = ("total_count", "logits")

    def __init__(self, total_count: Tensor, logits: Tensor) -> None:
        shape = torch.broadcast_shapes(total_count.shape, logits.shape[:-1])
        self.total_count = total_count.expand(shape)
        self.logits = logits.log_softmax(-1).expand(*shape, logits.shape[-1])
        super().__init__(shape, self.logits.shape[-1:])

    @property
    def support(self) -> Any:
        """Counts with the sum of each row."""
        return constraints.multinomial(self.total_count)

    @property
    def probs(self) -> Tensor:
        """The probabilities of the categories, (..., K)."""
        return self.logits.exp()

    def _log_prob(self, value: Tensor) -> Tensor:
        ways = torch.lgamma(value.sum(-1) + 1.0) - torch.lgamma(value + 1.0).sum(-1)
        return ways + (value * self.logits).sum(-1)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return expected counts and their variances, (..., K)."""
        mean = self.total_count[..., None] * self.probs
        return mean, mean * (1.0 - self.probs)

    def _draw(self) -> Tensor:
        """Return counts, (..., K): each category's is binomial given those before it."""
        remaining = self.total_count.to(self.logits.dtype)
        from_here = self.logits.flip(-1).logcumsumexp(-1).flip(-1)  # and later categories
        counts = []
        for share in (self.logits - from_here).exp().clamp(max=1.0).unbind(-1)[:-1]:
            counts.append(torch.binomial(remaining, share))
            remaining = remaining - counts[-1]
        return torch.stack([*counts, remaining], -1)


def _outputs(response: Response) -> int:
    """Return the number of columns but the first, which is the reference."""
    return count_of(response, "a response in parts, cbind(a, b, c),", "columns") - 1


@recorded
def multinomial() -> ResponseFamily:
    """Return the family of counts in K categories that add up to the row field "trials".

        y ~ Multinomial(trials, softmax(0, eta_1, ..., eta_{K - 1}))

    The response has K columns, and the linear predictor K - 1; the first category is the reference.
    """
    return ResponseFamily(
        name="multinomial",
        link="logit",
        kind="counts",
        likelihood=("families.Multinomial(batch.trials, torch.nn.functional.pad(eta, (1, 0)))"),
        parameters=no_parameters,
        scale=unit_scale,
        additions=("trials",),
        required=("trials",),
        outputs=_outputs,
    )


@recorded
def dirichlet() -> ResponseFamily:
    """Return the family of K shares that add up to one, each above 0.

        y ~ Dirichlet(p phi),    p = softmax(0, eta_1, ..., eta_{K - 1})
        phi ~ InverseGamma(0.4, 0.3)

    The response has K columns, and the linear predictor K - 1; the first share is the reference.
    The larger phi, the closer y to p.
    """
    likelihood = (
        "families.Dirichlet(torch.nn.functional.pad(eta, (1, 0)).softmax(-1) * phi[..., None])"
    )
    return ResponseFamily(
        "dirichlet",
        "logit",
        "shares",
        likelihood,
        priors(phi=a_shape),
        unit_scale,
        outputs=_outputs,
    )
