"""What distributions of rows share: fields that grow with the batch, checks, draws and moments."""

from typing import Any, ClassVar, Self

import pyro.distributions as dist
import torch
from torch import Tensor


class RowDistribution(dist.TorchDistribution):
    """A distribution made of fields with an entry for each row, of its batch shape.

    A subclass lists these fields, tensors and distributions, in `FIELDS`; what else it holds is the
    same for all rows. It defines `_log_prob`, `_draw` and `moments`.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    FIELDS: ClassVar[tuple[str, ...]]

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """Return the same distribution with a larger batch shape."""
        made: Any = self._get_checked_instance  # untyped in torch
        new: Self = made(type(self), _instance)
        shape, dims = torch.Size(batch_shape), len(self.batch_shape)
        grown = {name: _expanded(getattr(self, name), shape, dims) for name in self.FIELDS}
        new.__dict__.update(vars(self) | grown)
        super(RowDistribution, new).__init__(shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density in nats, or the log probability, of the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        return self._log_prob(value)

    def _log_prob(self, value: Tensor) -> Tensor:
        raise NotImplementedError

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return draws without gradients, (*sample_shape, *batch_shape, *event_shape)."""
        with torch.no_grad():
            return self.expand(torch.Size(sample_shape) + self.batch_shape)._draw()

    def _draw(self) -> Tensor:
        raise NotImplementedError

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance, of the batch and event shape."""
        raise NotImplementedError

    @property
    def mean(self) -> Tensor:
        """The mean, of the batch and event shape."""
        return self.moments()[0]

    @property
    def variance(self) -> Tensor:
        """The variance, of the batch and event shape."""
        return self.moments()[1]


def _expanded(field: Any, shape: torch.Size, dims: int) -> Any:
    """Return a field with `shape` in place of its first `dims` dimensions."""
    if isinstance(field, list):
        return [_expanded(entry, shape, dims) for entry in field]
    if isinstance(field, Tensor):
        return field.expand(shape + field.shape[dims:])
    return None if field is None else field.expand(shape)
