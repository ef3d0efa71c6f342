"""Shares of which some are exactly 0 or 1: ordered beta responses."""

from __future__ import annotations

from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor
from torch.nn.functional import logsigmoid

from hierfl.core.gaussians import log1mexp
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.levels import Ordered
from hierfl.models.families.links import shape_prior, unit_scale
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


class OrderedBeta(dist.TorchDistribution):
    """Shares from 0 to 1, both of which have a probability (Kubinec 2023, Political Analysis 31:519).

        P(0) = 1 - F(eta - c_1),    P(1) = F(eta - c_2),    F(x) = 1 / (1 + exp(-x))
        y ~ Beta(F(eta) phi, (1 - F(eta)) phi) between them, with probability 1 - P(0) - P(1)

    Args:
        eta: linear predictor, of the batch shape.
        thresholds: c_1 < c_2, (..., 2).
        phi: precision of the shares between 0 and 1.
        validate_args: whether to check values. Default None: Pyro's setting.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.unit_interval

    def __init__(
        self, eta: Tensor, thresholds: Tensor, phi: Tensor, *, validate_args: bool | None = None
    ) -> None:
        low, high = thresholds[..., 0], thresholds[..., 1]
        self.eta, self.low, self.high, self.phi = torch.broadcast_tensors(eta, low, high, phi)
        super().__init__(self.eta.shape, torch.Size(), validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> OrderedBeta:
        """Return the same distribution with a larger batch shape."""
        made: Any = self._get_checked_instance  # untyped in torch
        new: OrderedBeta = made(OrderedBeta, _instance)
        batch_shape = torch.Size(batch_shape)
        for name in ("eta", "low", "high", "phi"):
            setattr(new, name, getattr(self, name).expand(batch_shape))
        super(OrderedBeta, new).__init__(batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

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

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density in nats, of the batch shape; of 0 and 1 the log probability."""
        if self._validate_args:
            self._validate_sample(value)
        zero, one, inside = self.logits.unbind(-1)
        at_end = (value == 0) | (value == 1)
        safe = torch.where(at_end, torch.full_like(value, 0.5), value)  # its gradient is finite
        density = inside + self.between.log_prob(safe)
        return torch.where(at_end, torch.where(value == 0, zero, one), density)

    @property
    def mean(self) -> Tensor:
        """The mean, zeros and ones among them."""
        _, one, inside = self.logits.exp().unbind(-1)
        return one + inside * self.eta.sigmoid()

    @property
    def variance(self) -> Tensor:
        """The variance, zeros and ones among them."""
        _, one, inside = self.logits.exp().unbind(-1)
        square = self.between.variance + self.between.mean**2
        return one + inside * square - self.mean**2

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return draws without gradients, (*sample_shape, *batch_shape)."""
        with torch.no_grad():
            shape = torch.Size(sample_shape)
            value: Tensor = self.between.sample(shape)
            zero, one, _ = self.logits.exp().unbind(-1)
            at = torch.rand_like(value)
            value = torch.where(at < zero, torch.zeros_like(value), value)
            return torch.where(at > 1.0 - one, torch.ones_like(value), value)


def _parameters(response: Response) -> dict[str, Prior]:
    return {"phi": shape_prior(), "thresholds": Ordered(dist.StudentT(3.0, 0.0, 2.5), 2)}


@recorded
def ordered_beta() -> ResponseFamily:
    """Return the family of shares from 0 to 1, both included, logit link.

        P(0) = 1 - F(eta - c_1),    P(1) = F(eta - c_2),    F the logistic function
        y ~ Beta(F(eta) phi, (1 - F(eta)) phi) between them
        phi ~ InverseGamma(0.4, 0.3),    c: two ordered draws of StudentT(3, 0, 2.5)

    A larger eta makes larger shares, and ones, more probable. Kubinec 2023, Political Analysis
    31:519, has an induced Dirichlet prior of the thresholds c instead.

    >>> ordered_beta().likelihood
    'families.OrderedBeta(eta, thresholds, phi)'
    """
    likelihood = "families.OrderedBeta(eta, thresholds, phi)"
    return ResponseFamily("ordered_beta", "logit", "share", likelihood, _parameters, unit_scale)
