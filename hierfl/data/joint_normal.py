"""The joint Normal of a client's rows, for models with one density of all of them."""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor


class JointNormal(dist.MultivariateNormal):
    """The joint Normal of rows: `loc` (..., B); rows not `inside` (..., B), padding, add 0."""

    def __init__(self, loc: Tensor, covariance: Tensor, inside: Tensor) -> None:
        pairs = inside[..., :, None] & inside[..., None, :]
        unit = torch.eye(inside.shape[-1], dtype=covariance.dtype, device=covariance.device)
        super().__init__(
            torch.where(inside, loc, loc.new_zeros(())),
            covariance_matrix=torch.where(pairs, covariance, unit),
        )
        self.inside = inside

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of the rows (..., B) that are not padding, in nats."""
        there = torch.where(self.inside, value, self.loc)
        total: Tensor = super().log_prob(there)  # type: ignore[no-untyped-call]
        return total + 0.5 * math.log(2.0 * math.pi) * (~self.inside).sum(-1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "JointNormal":
        """Return the same distribution with a larger batch shape."""
        base: Any = super()
        made = base._get_checked_instance(JointNormal, _instance)
        new: JointNormal = base.expand(batch_shape, made)
        new.inside = self.inside.expand(*batch_shape, self.inside.shape[-1])
        return new
