"""Likelihoods of a row given a network's output: any function `(output (C, B, K)) -> distribution of batch shape (C, B)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyro.distributions as dist
from pyro.distributions.torch_distribution import TorchDistributionMixin as Distribution
from torch import Tensor

from hierfl.models.priors import Prior, check_scale, either, given
from hierfl.program.recipes import recorded

__all__ = ["Bernoulli", "Likelihood", "bernoulli", "categorical", "normal", "poisson"]


@dataclass(frozen=True)
class Likelihood:
    """A likelihood, with global numbers of its own if it needs any.

    Args:
        of: `(output, **numbers) -> distribution`, output (C, B, K), batch shape (C, B); a row's own dimensions by `.to_event`.
        priors: name of a number -> its prior, a global site of that name (or a known value).

    A plain function serves too: `bayesian_network(net, likelihood=lambda out: dist.Laplace(out[..., 0], 1.0))`.
    """

    of: Callable[..., Distribution]
    priors: Mapping[str, Prior] = field(default_factory=dict)

    def __call__(self) -> Callable[[Tensor], Distribution]:
        """Sample its global numbers, outside the plates; the answer takes the output, inside them."""
        numbers = {name: given(name, prior) for name, prior in self.priors.items()}
        return lambda output: self.of(output, **numbers)


class Bernoulli(dist.Bernoulli):  # type: ignore[misc]
    """Pyro's, for labels of any dtype: torch's takes none but floats."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of 0/1 labels."""
        density: Tensor = super().log_prob(value.to(self.logits.dtype))
        return density


@recorded
def categorical() -> Likelihood:
    """Labels 0..K-1: y ~ Categorical(softmax(output)).

    >>> categorical().priors
    {}
    """

    def of(output: Tensor) -> Distribution:
        if output.shape[-1] < 2:
            raise ValueError(
                "a categorical likelihood needs an output a class, two at least; for 0/1 labels take bernoulli()"
            )
        return dist.Categorical(logits=output)

    return Likelihood(of)


@recorded
def bernoulli() -> Likelihood:
    """Labels 0/1, one output a row: y ~ Bernoulli(sigmoid(output))."""
    return Likelihood(lambda output: Bernoulli(logits=single(output)))


@recorded
def normal(scale: Prior | None = None) -> Likelihood:
    """Real labels, one output a row: y ~ Normal(output, noise_scale^2).

    Args:
        scale: prior of the global site `noise_scale`, or a number > 0 where it is known. Default HalfNormal(1), for y of about
            unit scale.
    """
    prior = either(scale, lambda: dist.HalfNormal(1.0))
    return Likelihood(
        lambda output, noise_scale: dist.Normal(single(output), noise_scale),
        {"noise_scale": check_scale("scale", prior)},
    )


@recorded
def poisson() -> Likelihood:
    """Counts 0, 1, 2, ..., one output a row: y ~ Poisson(exp(output))."""
    return Likelihood(lambda output: dist.Poisson(single(output).exp()))


def single(output: Tensor) -> Tensor:
    """The only output of each row, (C, B) of (C, B, 1)."""
    if output.shape[-1] != 1:
        raise ValueError(
            f"this likelihood takes one output a row; the network gives {output.shape[-1]}"
        )
    return output[..., 0]
