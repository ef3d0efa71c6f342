"""Likelihoods for networks, `(output (C, B, outputs)) -> distribution`; observed fields."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
from pyro.distributions.torch_distribution import TorchDistributionMixin as Distribution
from torch import Tensor

from hierfl.core.arguments import spelled
from hierfl.data.batch import ClientBatch
from hierfl.models.priors import Prior, check_scale, either, given
from hierfl.program.sites import recorded


def field(batch: ClientBatch, name: str) -> Tensor:
    """Return a field by its name, even if `ClientBatch` has an attribute of the same name."""
    return batch.fields[name] if name in batch.fields else getattr(batch, name)


def observe(name: str, fn: Distribution, batch: ClientBatch) -> None:
    """Observe a field at a site of its name; refuse rows that would broadcast."""
    y = field(batch, name)
    if y.dim() != 2 + len(fn.event_shape):
        shape, event = tuple(y.shape[2:]), tuple(fn.event_shape)
        raise ValueError(
            f"field '{name}' has shape {shape} per row, but its likelihood ({type(fn).__name__}) needs {event}"
        )
    pyro.sample(name, fn, obs=y)


__all__ = ["Bernoulli", "Likelihood", "bernoulli", "categorical", "normal", "poisson"]


@spelled
@dataclass(frozen=True)
class Likelihood:
    """A likelihood of each row given the network's output, with global unknowns of its own.

    A plain function is enough where there are none:
    `bayesian_network(net, likelihood=lambda out: dist.Laplace(out[..., 0], 1.0))`.

    Args:
        of: `(output, **parameters) -> distribution`, with output (C, B, outputs) and batch shape (C,
            B). Dimensions within a row are declared by `.to_event`.
        priors: name of a parameter -> its prior, which makes a global site of that name, or its known
            value.
    """

    of: Callable[..., Distribution]
    priors: Mapping[str, Prior] = dataclasses.field(default_factory=dict)

    def __call__(self) -> Callable[[Tensor], Distribution]:
        """Sample the global parameters; return `(output) -> distribution`, for inside both plates."""
        parameters = {name: given(name, prior) for name, prior in self.priors.items()}
        return lambda output: self.of(output, **parameters)


def as_likelihood(likelihood: Likelihood | Callable[[Tensor], Distribution] | None) -> Likelihood:
    """Return a likelihood as a `Likelihood`; None is `categorical()`."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    return Likelihood(likelihood) if likelihood else categorical()


class Bernoulli(dist.Bernoulli):  # type: ignore[misc]
    """Pyro's Bernoulli for labels of any dtype, where torch's accepts only floats."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of 0/1 labels."""
        return super().log_prob(value.to(self.logits.dtype))


@recorded
def categorical() -> Likelihood:
    """Return the likelihood of labels 0, 1, ..., with one output per class.

        y ~ Categorical(softmax(output))

    Raises:
        ValueError: the network has fewer than 2 outputs. This is found when the model runs.

    >>> categorical().priors
    {}
    """

    def of(output: Tensor) -> Distribution:
        needs = "categorical() needs one per class, at least 2; for 0/1 labels use bernoulli()"
        _check_outputs(output, output.shape[-1] >= 2, needs)
        return dist.Categorical(logits=output)

    return Likelihood(of)


@recorded
def bernoulli() -> Likelihood:
    """Return the likelihood of 0/1 labels, with one output per row.

        y ~ Bernoulli(sigmoid(output))

    Raises:
        ValueError: the network has several outputs. This is found when the model runs.
    """
    return Likelihood(lambda output: Bernoulli(logits=single(output)))


@recorded
def normal(scale: Prior | None = None) -> Likelihood:
    """Return the likelihood of real labels, with one output per row.

        y ~ Normal(output, noise_scale^2)

    Args:
        scale: prior of the global site `noise_scale` (), a standard deviation, or its known value >
            0. Default HalfNormal(1), for y of about unit scale.

    Raises:
        ValueError: `scale` is a prior that allows negative values, or a number that is not > 0; or
            the network has several outputs, which is found when the model runs.
    """
    prior = either(scale, lambda: dist.HalfNormal(1.0))
    return Likelihood(
        lambda output, noise_scale: dist.Normal(single(output), noise_scale),
        {"noise_scale": check_scale("scale", prior)},
    )


@recorded
def poisson() -> Likelihood:
    """Return the likelihood of counts 0, 1, 2, ..., with one output per row.

        y ~ Poisson(exp(output))

    Raises:
        ValueError: the network has several outputs. This is found when the model runs.
    """
    return Likelihood(lambda output: dist.Poisson(single(output).exp()))


def single(output: Tensor) -> Tensor:
    """Return the only output of each row: (C, B) from (C, B, 1)."""
    _check_outputs(output, output.shape[-1] == 1, "this likelihood takes exactly 1")
    return output[..., 0]


def _check_outputs(output: Tensor, fits: bool, needs: str) -> None:
    if not fits:
        raise ValueError(f"the network gives {output.shape[-1]} outputs per row: {needs}")
