"""The mixture of a distribution over the values of discrete sites, which are its leading batch dimensions.

Its components are scored by parameters of their own size, before plates repeat them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from pyro.distributions import TorchDistribution
from pyro.poutine.broadcast_messenger import BroadcastMessenger
from torch import Tensor
from torch.distributions import constraints

from hierfl.core.process import replaced


def unexpanded(fn: Any) -> Any:
    """Return a site's distribution before plates repeated its parameters, if `noting_parameters` was on."""
    return getattr(fn, "_unexpanded", fn)


def expanded(fn: Any, shape: tuple[int, ...]) -> Any:
    """Return a distribution for plates, which remembers the parameters that they repeat."""
    return _noted(fn.expand(shape), fn)


def _noted(repeated: Any, fn: Any) -> Any:
    repeated._unexpanded = unexpanded(fn)
    return repeated


def _expand(msg: Any) -> None:
    fn = msg["fn"]
    _pyros_expand(msg)
    if msg["fn"] is not fn:
        _noted(msg["fn"], fn)


_pyros_expand: Any = BroadcastMessenger._pyro_sample


def noting_parameters() -> AbstractContextManager[None]:
    """Let plates note at each site the parameters that they repeat."""
    return replaced([(BroadcastMessenger, "_pyro_sample", staticmethod(_expand))])


class Mixture(TorchDistribution):
    """The mixture of a distribution's leading batch dimensions, (*K, *plates), by log weights.

    Args:
        fn: the components.
        log_weights: normalized over the leading dimensions, of a shape that broadcasts to theirs.
        plates: the number of batch dimensions that stay.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, fn: Any, log_weights: Tensor, plates: int) -> None:
        shape = torch.broadcast_shapes(fn.batch_shape, log_weights.shape)
        self.fn, self.log_weights = fn, log_weights
        self.over = tuple(range(len(shape) - plates))
        super().__init__(shape[len(self.over) :], fn.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of the components; of counts up to the largest of theirs."""
        support = self.fn.support
        if isinstance(getattr(support, "upper_bound", None), Tensor):
            return constraints.integer_interval(support.lower_bound, self.total_count)
        return support

    @property
    def total_count(self) -> Tensor:
        """The number of trials, of Binomials, (*plates)."""
        trials: Tensor = self.fn.total_count.expand(*self.sizes, *self.batch_shape)
        return trials.amax(self.over)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """Always False: the component is drawn."""
        return False

    def expand(self, batch_shape: Any, _instance: Any = None) -> Mixture:
        """Return the mixture for more plates."""
        shape = torch.Size(batch_shape)
        fn = self.fn.expand(torch.broadcast_shapes(self.fn.batch_shape, shape))
        return Mixture(fn, self.log_weights, len(shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of the mixture, of the batch shape."""
        joint = self.log_weights + unexpanded(self.fn).log_prob(value)
        log = joint.logsumexp(tuple(range(joint.dim() - len(self.batch_shape))))
        return log.expand(torch.broadcast_shapes(log.shape, self.batch_shape))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw a component of each entry, and its value."""
        shape = torch.Size(sample_shape)
        label = torch.distributions.Categorical(self.probs).sample(shape)
        values = self.fn.expand((*self.sizes, *self.batch_shape)).sample(shape)
        values = values.flatten(len(shape), len(shape) + len(self.over) - 1)
        index = label.unsqueeze(len(shape))[(..., *[None] * self.event_dim)]
        index = index.expand(*shape, 1, *self.batch_shape, *self.event_shape)
        return values.gather(len(shape), index).squeeze(len(shape))

    @property
    def mean(self) -> Tensor:
        """The mean of the components' means."""
        return self._average(self.fn.mean)

    @property
    def variance(self) -> Tensor:
        """The mean of the components' variances, and the variance of their means."""
        mean = self.fn.mean
        return self._average(self.fn.variance) + self._average((mean - self.mean) ** 2)

    @property
    def probs(self) -> Tensor:
        """The components' probabilities, (*plates, K), whatever their number of dimensions."""
        weights = self.log_weights.exp().expand(*self.sizes, *self.batch_shape)
        return weights.flatten(0, len(self.over) - 1).movedim(0, -1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the leading dimensions."""
        shape = torch.broadcast_shapes(self.fn.batch_shape, self.log_weights.shape)
        return tuple(shape[: len(self.over)])

    def _average(self, value: Tensor) -> Tensor:
        weights = self.log_weights.exp()[(..., *[None] * self.event_dim)]
        return (weights * value).sum(self.over)
