"""`Ordered`: independent draws from one distribution, put in order."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor


class Ordered(dist.TorchDistribution):
    """The order statistics of independent draws: a prior of thresholds.

        log p(v_1 < ... < v_K) = sum_k log p(v_k) + log K!

    Args:
        base: distribution of one number, of any batch shape.
        size: K, the number of draws, >= 1.
        validate_args: whether to check values. Default None: Pyro's setting.

    Raises:
        ValueError: base is no distribution of one real number, or size is below 1.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.ordered_vector

    def __init__(
        self, base: TorchDistributionMixin, size: int, *, validate_args: bool | None = None
    ) -> None:
        fn: Any = base
        if fn.event_shape or fn.support is not constraints.real:
            raise ValueError(f"base is {base}: it must be the distribution of one real number")
        if size < 1:
            raise ValueError(f"size is {size}: it must be 1 or more")
        self.base, self.size = fn, size
        super().__init__(fn.batch_shape, torch.Size((size,)), validate_args=validate_args)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """Whether the base's draws have gradients, which sorting keeps."""
        return bool(self.base.has_rsample)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Ordered:
        """Return the same distribution with a larger batch shape."""
        made: Any = self._get_checked_instance  # untyped in torch
        new: Ordered = made(Ordered, _instance)
        batch_shape = torch.Size(batch_shape)
        new.base, new.size = self.base.expand(batch_shape), self.size
        super(Ordered, new).__init__(batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density in nats, of the batch shape.

        Args:
            value: (..., K), increasing.
        """
        if self._validate_args:
            self._validate_sample(value)
        each: Tensor = self.base.log_prob(value.movedim(-1, 0))
        return each.sum(0) + math.lgamma(self.size + 1.0)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Return sorted draws, (*sample_shape, *batch_shape, K)."""
        drawn: Tensor = self.base.rsample(torch.Size((self.size, *sample_shape)))
        return drawn.movedim(0, -1).sort(-1).values

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return sorted draws without gradients, (*sample_shape, *batch_shape, K)."""
        with torch.no_grad():
            drawn: Tensor = self.base.sample(torch.Size((self.size, *sample_shape)))
            return drawn.movedim(0, -1).sort(-1).values
