"""Draws as functions of a key, for distributions that are transforms of normals or uniforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as torch_dist
from torch import Tensor

from hierfl.core import noise


class NoKeyedDraw(NotImplementedError):
    """A distribution that hierfl cannot draw by transforming normals or uniforms."""


class NoSampler(NoKeyedDraw):
    """A distribution that cannot be drawn from at all."""


class Noise:
    """Standard normals and uniforms for one draw, as a function of its key.

    Args:
        key: (2,) int32 for a site outside the clients plate, (C, 2) inside it.
        axis: dimension of the clients in the shape of the draw, counted from the left; unused outside the
            plate.
    """

    def __init__(self, key: Tensor, axis: int) -> None:
        self.key, self.axis, self.calls = key, axis, 0

    def _drawn(
        self, source: Callable[..., Tensor], shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        key = noise.fold(self.key, self.calls) if self.calls else self.key
        self.calls += 1
        if key.dim() == 1:
            return source(key, tuple(shape), dtype)
        rest = (*shape[: self.axis], *shape[self.axis + 1 :])
        return source(key, rest, dtype).movedim(0, self.axis)

    def normal(self, like: Tensor, shape: torch.Size) -> Tensor:
        """Return standard normals of a shape, in the dtype of `like`."""
        return self._drawn(noise.normals, shape, like.dtype)

    def uniform(self, like: Tensor, shape: torch.Size) -> Tensor:
        """Return uniforms in the open interval (0, 1) of a shape, in the dtype of `like`."""
        return self._drawn(noise.uniforms, shape, like.dtype)


def draw(fn: Any, source: Noise) -> Tensor:
    """Return one reparameterized draw, of shape `(*fn.batch_shape, *fn.event_shape)`.

    Args:
        fn: the distribution.
        source: of the noise.

    Raises:
        NoKeyedDraw: the distribution (Gamma, Dirichlet, Poisson, ...) is not a known transform of normals or
            uniforms.
    """
    # fn.shape() is Pyro's alone: torch's own distributions, as inside a HalfNormal, lack it
    shape = torch.Size((*fn.batch_shape, *fn.event_shape))
    if isinstance(fn, dist.Delta):
        return fn.v
    if isinstance(fn, torch_dist.Independent | dist.MaskedDistribution):
        return draw(fn.base_dist, source)
    if isinstance(fn, torch_dist.TransformedDistribution):
        value = draw(fn.base_dist, source)
        for transform in fn.transforms:
            value = transform(value)
        return value
    if isinstance(fn, torch_dist.Normal):
        return fn.loc + fn.scale * source.normal(fn.loc, shape)
    if isinstance(fn, torch_dist.MultivariateNormal):
        eps = source.normal(fn.loc, shape)
        return fn.loc + (fn._unbroadcasted_scale_tril @ eps[..., None])[..., 0]
    if isinstance(fn, torch_dist.LowRankMultivariateNormal):
        factor = fn._unbroadcasted_cov_factor
        low = source.normal(fn.loc, fn.batch_shape + factor.shape[-1:])
        own = source.normal(fn.loc, shape)
        return fn.loc + (factor @ low[..., None])[..., 0] + fn._unbroadcasted_cov_diag.sqrt() * own
    if isinstance(fn, torch_dist.Uniform):
        return fn.low + (fn.high - fn.low) * source.uniform(fn.low, shape)
    if isinstance(fn, torch_dist.Cauchy | torch_dist.Laplace | torch_dist.Exponential):
        like = fn.rate if isinstance(fn, torch_dist.Exponential) else fn.loc
        inverse: Any = fn.icdf
        return inverse(source.uniform(like, shape))
    raise NoKeyedDraw(
        type(fn.base_dist if isinstance(fn, dist.ExpandedDistribution) else fn).__name__
    )


def seeded(fn: torch_dist.Distribution, key: Tensor, *, reparameterized: bool = True) -> Tensor:
    """Return one draw by torch's own sampler, its generator seeded by the key, of one client at a time.

    The same key gives the same draw.

    Args:
        fn: a distribution with reparameterized draws (Gamma, Beta, Dirichlet, StudentT, ...).
        key: (2,) or (1, 2) int32.
        reparameterized: whether the draw must have a gradient, as a guide's must; a prior's need not.

    Raises:
        NoKeyedDraw: the distribution has no reparameterized draw, or there are several clients, stacked or
            under vmap.
        NoSampler: the distribution has no draw at all.
    """
    if reparameterized and not fn.has_rsample:
        raise NoKeyedDraw(f"{type(fn).__name__} (which has no reparameterized draw)")
    apart = NoKeyedDraw(
        f"{type(fn).__name__} (drawn by torch itself, one client and one draw at a time)"
    )
    if key.numel() != 2:
        raise apart
    try:
        first, second = key.flatten().tolist()
    except RuntimeError as error:  # under vmap the value of a key cannot be read
        raise apart from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(((first & 0x7FFFFFFF) << 32) | (second & 0xFFFFFFFF))
        try:
            value: Tensor = fn.rsample() if fn.has_rsample else fn.sample()
        except NotImplementedError as error:
            raise NoSampler(type(fn).__name__) from error
    return value
