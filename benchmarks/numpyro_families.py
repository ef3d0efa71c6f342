"""The families of printed programs in NumPyro: densities written again, with JAX, from their equations.

`benchmarks.formula_sampler` runs a formula's printed program with these names in place of
`hierfl.models.families`. It imports neither torch nor hierfl.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpyro.distributions as dist
from jax import numpy as jnp
from jax.nn import log_sigmoid, log_softmax, sigmoid
from jax.scipy.special import betainc, gammainc, gammaincc, gammaln
from jax.scipy.stats import norm


def of_density(support: Any, density: Callable[[Any], Any], shape: Any, event: Any = ()) -> Any:
    """Return a distribution of a log density alone, which can be observed and not drawn."""

    class Density(dist.Distribution):  # type: ignore[misc]
        """A log density."""

        def log_prob(self, value: Any) -> Any:
            """Return the log density."""
            return density(value)

    Density.support = support
    return Density(batch_shape=shape, event_shape=event)


def ordered(base: Any, size: int) -> Any:
    """Return the order statistics of `size` draws."""

    class Ordered(dist.Distribution):  # type: ignore[misc]
        """Sorted draws."""

        support = dist.constraints.ordered_vector

        def sample(self, key: Any, sample_shape: Any = ()) -> Any:
            """Return sorted draws."""
            return jnp.sort(base.sample(key, (*sample_shape, size)), -1)

        def log_prob(self, value: Any) -> Any:
            """Return the log density."""
            return base.log_prob(value).sum(-1) + math.lgamma(size + 1.0)

    return Ordered(event_shape=(size,))


def cumulative(eta: Any, thresholds: Any) -> Any:
    """Return levels in order, whose numbers may be floats."""
    levels = dist.OrderedLogistic(eta, thresholds)
    return of_density(levels.support, lambda y: levels.log_prob(y.astype(int)), levels.batch_shape)


def negative_binomial(total_count: Any, logits: Any) -> Any:
    """Return counts of mean total_count exp(logits)."""
    return dist.NegativeBinomial2(total_count * jnp.exp(logits), total_count)


def below(base: Any, count: Any) -> Any:
    """Return P(Y <= count) of a distribution of counts, 0 of counts below 0."""
    if isinstance(base, dist.Poisson):
        return jnp.where(count < 0, 0.0, gammaincc(jnp.floor(count) + 1.0, base.rate))
    p = base.concentration / (base.concentration + base.mean)
    return jnp.where(count < 0, 0.0, betainc(base.concentration, jnp.floor(count) + 1.0, p))


def above(base: Any, count: Any) -> Any:
    """Return P(Y >= count) of a distribution of counts, count >= 1."""
    if isinstance(base, dist.Poisson):
        return gammainc(count, base.rate)
    p = base.mean / (base.concentration + base.mean)
    return jnp.exp(_log_binomial_tail(base.concentration, count, p))


def _log_binomial_tail(shape: Any, count: Any, p: Any) -> Any:
    """Return log P(Y >= count), by its terms: betainc has no derivative in the shape."""
    k = jnp.arange(int(count) - 1)
    k = k.reshape(-1, *[1] * jnp.ndim(p))
    steps = jnp.cumsum(jnp.log((k + shape) / (k + 1.0)) + jnp.log(p), 0)
    below = jnp.logaddexp(jax.scipy.special.logsumexp(steps, 0), 0.0) + shape * jnp.log1p(-p)
    return jnp.log1p(-jnp.exp(below))


def truncated(base: Any, low: float = -math.inf, high: float = math.inf) -> Any:
    """Return responses between two bounds."""
    if isinstance(base, dist.Normal):
        return dist.TruncatedDistribution(
            base,
            low=None if low == -math.inf else low,
            high=None if high == math.inf else high,
        )
    if high == math.inf:
        mass = above(base, max(low, 0.0))
    else:
        mass = below(base, high) - below(base, low - 1.0)
    return of_density(base.support, lambda y: base.log_prob(y) - jnp.log(mass), base.batch_shape)


def hurdle(base: Any, hu: Any) -> Any:
    """Return 0 with probability hu, else a draw above 0."""
    is_count = base.support is dist.constraints.nonnegative_integer

    def density(y: Any) -> Any:
        safe = jnp.where(y == 0, 1.0, y)
        positive = base.log_prob(safe)
        if is_count:
            positive = positive - jnp.log1p(-jnp.exp(base.log_prob(jnp.zeros_like(y))))
        return jnp.where(y == 0, jnp.log(hu), jnp.log1p(-hu) + positive)

    return of_density(base.support, density, base.batch_shape)


def ordered_beta(eta: Any, thresholds: Any, phi: Any) -> Any:
    """Return Kubinec's ordered beta, by cumulative probabilities."""
    zero, one = sigmoid(thresholds[0] - eta), sigmoid(eta - thresholds[1])

    def density(y: Any) -> Any:
        safe = jnp.where((y == 0) | (y == 1), 0.5, y)
        between = dist.Beta(sigmoid(eta) * phi, sigmoid(-eta) * phi).log_prob(safe)
        between = between + jnp.log(sigmoid(eta - thresholds[0]) - one)
        return jnp.where(y == 0, jnp.log(zero), jnp.where(y == 1, jnp.log(one), between))

    return of_density(dist.constraints.unit_interval, density, jnp.shape(eta))


def skew_normal(loc: Any, scale: Any, alpha: Any) -> Any:
    """Return Azzalini's skew normal of a mean and a standard deviation."""
    delta = alpha / jnp.sqrt(1.0 + alpha**2)
    width = scale / jnp.sqrt(1.0 - 2.0 * delta**2 / jnp.pi)
    start = loc - width * delta * jnp.sqrt(2.0 / jnp.pi)

    def density(y: Any) -> Any:
        z = (y - start) / width
        return jnp.log(2.0 / width) + norm.logpdf(z) + norm.logcdf(alpha * z)

    return of_density(dist.constraints.real, density, jnp.shape(loc))


def multinomial(total_count: Any, logits: Any) -> Any:
    """Return counts of categories."""

    def density(y: Any) -> Any:
        ways = gammaln(y.sum(-1) + 1.0) - gammaln(y + 1.0).sum(-1)
        return ways + (y * log_softmax(logits)).sum(-1)

    support = dist.constraints.independent(dist.constraints.nonnegative_integer, 1)
    return of_density(support, density, jnp.shape(logits)[:-1], jnp.shape(logits)[-1:])


def sratio_logits(eta: Any, thresholds: Any) -> Any:
    """Return log probabilities of levels that are reached one after another."""
    at = thresholds - eta[..., None]
    go = jnp.cumsum(log_sigmoid(-at), -1)
    reached = jnp.concatenate([jnp.zeros_like(go[..., :1]), go[..., :-1]], -1)
    return jnp.concatenate([log_sigmoid(at) + reached, go[..., -1:]], -1)


def acat_logits(eta: Any, thresholds: Any) -> Any:
    """Return log probabilities of levels by the odds of neighbors, up to a constant."""
    sums = jnp.cumsum(eta[..., None] - thresholds, -1)
    return jnp.concatenate([jnp.zeros_like(sums[..., :1]), sums], -1)


FAMILIES = SimpleNamespace(
    Binomial=dist.Binomial,
    Cumulative=cumulative,
    Dirichlet=dist.Dirichlet,
    Hurdle=hurdle,
    Multinomial=multinomial,
    NegativeBinomial=negative_binomial,
    Ordered=ordered,
    OrderedBeta=ordered_beta,
    SkewNormal=skew_normal,
    Truncated=truncated,
    VonMises=dist.VonMises,
    acat_logits=acat_logits,
    sratio_logits=sratio_logits,
)
