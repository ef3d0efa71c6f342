"""A tensor whose prior is a penalty, which need not be a density: for point estimates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from hierfl.core.arguments import spelled

Above = dict[str, Tensor]


@spelled
class Penalized(TorchDistribution):
    """A tensor with the unnormalized density exp(-penalty(w)).

    It is for point estimates (guide `delta`), not for draws.

    Args:
        center: (*event), where guides start.
        penalty: a smooth function w (*event) -> ().
        batch_shape: shape of the plates around it.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (torch's own form)

    def __init__(
        self, center: Tensor, penalty: Callable[[Tensor], Tensor], batch_shape: tuple[int, ...] = ()
    ) -> None:
        self.center, self.penalty = center, penalty
        super().__init__(torch.Size(batch_shape), center.shape, validate_args=False)

    @property
    def support(self) -> Any:
        """All real tensors."""
        return constraints.independent(constraints.real, len(self.event_shape))

    @property
    def mean(self) -> Tensor:
        """The center."""
        return self.center.expand(self.batch_shape + self.event_shape)

    def expand(self, batch_shape: Any, _instance: object = None) -> Penalized:
        """Return the same distribution with another batch shape."""
        return Penalized(self.center, self.penalty, tuple(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return minus the penalty of each tensor, (*batch)."""
        events = value.reshape(-1, *self.event_shape)
        lead = value.shape[: value.dim() - len(self.event_shape)]
        each = (
            torch.stack([-self.penalty(v) for v in events.unbind(0)])
            if len(events) > 1
            else -self.penalty(events[0])[None]
        )
        return each.reshape(lead).expand(torch.broadcast_shapes(lead, self.batch_shape))


def center_param(name: str, start: Tensor) -> Tensor:
    """Declare the global param theta, which starts at the module's values."""
    return pyro.param(f"theta.{name}", start.clone)
