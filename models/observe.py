"""What a model reads of a batch, and where it observes it."""

from __future__ import annotations

import pyro
from pyro.distributions.torch_distribution import TorchDistributionMixin as Distribution
from torch import Tensor

from hierfl.data.batch import ClientBatch


def field(batch: ClientBatch, name: str) -> Tensor:
    """A field by its name, whatever else a batch has of that name."""
    value: Tensor = batch.fields[name] if name in batch.fields else getattr(batch, name)
    return value


def observe(name: str, fn: Distribution, batch: ClientBatch) -> None:
    """Observe a field, inside both plates; a site of the field's name.

    Raises:
        ValueError: labels of another shape than the distribution's, which would broadcast silently.
    """
    y = field(batch, name)
    if y.dim() != 2 + len(fn.event_shape):
        found, wanted = tuple(y.shape[2:]), tuple(fn.event_shape)
        raise ValueError(
            f"field '{name}' has shape {found} a row, its likelihood ({type(fn).__name__}) {wanted}"
        )
    pyro.sample(name, fn, obs=y)
