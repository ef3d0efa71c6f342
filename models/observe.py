"""How a model reads a field of a batch, and how it observes one."""

from __future__ import annotations

import pyro
from pyro.distributions.torch_distribution import TorchDistributionMixin as Distribution
from torch import Tensor

from hierfl.data.batch import ClientBatch


def field(batch: ClientBatch, name: str) -> Tensor:
    """Return a field by its name, even if `ClientBatch` has an attribute of the same name."""
    return batch.fields[name] if name in batch.fields else getattr(batch, name)


def observe(name: str, fn: Distribution, batch: ClientBatch) -> None:
    """Observe a field at a site of its name, inside both plates; refuse rows that would broadcast."""
    y = field(batch, name)
    if y.dim() != 2 + len(fn.event_shape):
        found, wanted = tuple(y.shape[2:]), tuple(fn.event_shape)
        raise ValueError(
            f"field '{name}' has shape {found} per row, "
            f"but its likelihood ({type(fn).__name__}) needs {wanted}"
        )
    pyro.sample(name, fn, obs=y)
