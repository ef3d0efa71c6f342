"""`JointNormal`: a joint Normal of all rows of a client, without its padded rows."""

from __future__ import annotations

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor


class JointNormal(dist.MultivariateNormal):
    """The joint Normal of rows: `loc` (..., B), and `inside` (..., B) for those that are no padding.

    Padded rows add nothing: independent, at their mean, with their density taken off.
    """

    def __init__(self, loc: Tensor, covariance: Tensor, inside: Tensor) -> None:
        both = inside[..., :, None] & inside[..., None, :]
        apart = torch.eye(inside.shape[-1], dtype=covariance.dtype, device=covariance.device)
        super().__init__(
            torch.where(inside, loc, loc.new_zeros(())),
            covariance_matrix=torch.where(both, covariance, apart),
        )
        self.inside = inside

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of the rows (..., B) that are not padding, in nats."""
        there = torch.where(self.inside, value, self.loc)
        total: Tensor = super().log_prob(there)  # type: ignore[no-untyped-call]
        return total + 0.5 * math.log(2.0 * math.pi) * (~self.inside).sum(-1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> JointNormal:
        """Return the same distribution with a larger batch shape."""
        base: Any = super()
        new: JointNormal = base.expand(
            batch_shape, base._get_checked_instance(JointNormal, _instance)
        )
        new.inside = self.inside.expand(*batch_shape, self.inside.shape[-1])
        return new
