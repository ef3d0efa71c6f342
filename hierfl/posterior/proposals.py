"""Proposals: draws of the guide, of a fitted Student t, and stretched local draws.

A guide's Gaussian global sites are a vector of coordinates x (K,) of known density, so points of
any other proposal have known weights: adaptive importance sampling (Cappe, Douc, Guillin, Marin and
Robert 2008, Statistics and Computing 18) with a multivariate t, as weights by a narrow Gaussian
have infinite variance. A client's local sites can be drawn from an equal mixture of the guide's
Gaussian and the same one stretched about its mean. Weights by the mixture (Hesterberg 1995,
Technometrics 37) show a guide that is too narrow.
"""

import math
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import ComposeTransform, TransformedDistribution

from hierfl.core.importance_sampling import Split, Weights, heavy_points
from hierfl.program.traces import in_clients, is_latent

FREEDOM = 7.0  # degrees of freedom of the t
COUNTS = 5  # effective draws per coordinate that the previous proposal counts for in a refit
GAUSSIAN = (dist.Normal, dist.MultivariateNormal, dist.LowRankMultivariateNormal)


class Coordinates(Messenger):
    """Read the coordinates of a guide's Gaussian global sites, or set them to a point (K,)."""

    def __init__(self, point: Tensor | None) -> None:
        super().__init__()
        self.point, self.used = point, 0
        self.read: list[Tensor] = []
        self.densities: list[Tensor] = []

    def _pyro_sample(self, msg: Any) -> None:
        normal = gaussian(msg)
        if self.point is None or normal is None:
            return
        base, transforms = normal
        shape = torch.Size((*base.batch_shape, *base.event_shape))
        value = self.point[self.used : self.used + shape.numel()].reshape(shape)
        self.used += shape.numel()
        msg["value"], msg["done"] = transforms(value), True

    def _pyro_post_sample(self, msg: Any) -> None:
        normal = gaussian(msg)
        if normal is None:
            return
        base, transforms = normal
        value = transforms.inv(msg["value"])
        self.read.append(value.reshape(-1))
        self.densities.append(base.log_prob(value).sum())

    def vector(self) -> Tensor:
        """Return the coordinates x, (K,)."""
        return torch.cat(self.read) if self.read else torch.zeros(0)

    def log_q(self) -> Tensor:
        """Return the log density of x under the guide, ()."""
        return torch.stack(self.densities).sum() if self.densities else torch.zeros(())


class Stretched(Messenger):
    """Stretch the Gaussians of a guide's D local unknowns by 1 + 1 / sqrt(D), and weight by the mixture."""

    def __init__(self, wide: Tensor, size: int) -> None:
        super().__init__()
        self.by = 1.0 + 1.0 / math.sqrt(max(size, 1))
        self.factor = torch.where(wide, self.by, 1.0)
        self.plain, self.wide = torch.zeros(()), torch.zeros(())
        self.found: dict[str, tuple[Any, ComposeTransform]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if (normal := gaussian(msg, local=True)) is not None:
            self.found[msg["name"]] = normal
            msg["fn"] = stretched(msg["fn"], self.factor.to(normal[0].loc.dtype))

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] not in self.found:
            return
        base, transforms = self.found[msg["name"]]
        value = transforms.inv(msg["value"])
        narrow, wide = (g.log_prob(value).sum() for g in (base, stretched(base, self.by)))
        self.plain, self.wide = self.plain + narrow, self.wide + wide

    def correction(self) -> Tensor:
        """Return log q_used - log q_mixture, (), which is added to the draw's log weight."""
        used = torch.where(self.factor > 1.0, self.wide, self.plain)
        return used - (torch.logaddexp(self.plain, self.wide) - math.log(2.0))


def stretched(fn: Any, factor: Tensor | float) -> Any:
    """Return a Gaussian or transformed Gaussian with its scale multiplied by a factor."""
    if isinstance(fn, dist.Normal):
        return dist.Normal(fn.loc, fn.scale * factor)
    if isinstance(fn, dist.MultivariateNormal):
        tril = fn._unbroadcasted_scale_tril * factor
        return dist.MultivariateNormal(fn.loc, scale_tril=tril)
    if isinstance(fn, dist.LowRankMultivariateNormal):
        low, own = fn._unbroadcasted_cov_factor, fn._unbroadcasted_cov_diag
        return dist.LowRankMultivariateNormal(fn.loc, low * factor, own * factor**2)
    base = stretched(fn.base_dist, factor)
    if isinstance(fn, TransformedDistribution):
        return dist.TransformedDistribution(base, fn.transforms)
    return base.to_event(fn.reinterpreted_batch_ndims)


def gaussian(msg: Any, *, local: bool = False) -> tuple[Any, ComposeTransform] | None:
    """Return the Gaussian below a latent site, and its transform; None if there is none."""
    if msg["type"] != "sample" or not is_latent(msg) or in_clients(msg) != local:
        return None
    fn = msg["fn"]
    transforms: list[Any] = []
    while not isinstance(fn, GAUSSIAN) and hasattr(fn, "base_dist"):
        if isinstance(fn, TransformedDistribution):
            transforms = [*fn.transforms, *transforms]
        fn = fn.base_dist
    return (fn, ComposeTransform(transforms)) if isinstance(fn, GAUSSIAN) else None


def refitted(at: Tensor, weights: Weights, before: Split | None) -> Split:
    """Fit a t to weighted draws (S, K); the fewer are effective, the nearer to the proposal `before`."""
    size, share, dtype = at.shape[1], weights.log.double().exp(), at.dtype
    at = at.double()
    mean, covariance = _moments(at, share)
    loc, spread = (
        _moments(at, torch.full_like(share, 1.0 / len(share)))
        if before is None
        else (before.loc.double(), (before.tril @ before.tril.T).double())
    )
    trust = weights.effective / (weights.effective + COUNTS * size)
    off = mean - loc
    mixed = trust * covariance + (1.0 - trust) * (spread + trust * torch.outer(off, off))
    loc, tril = (loc + trust * off).to(dtype), torch.linalg.cholesky(mixed).to(dtype)
    return Split(loc, tril, torch.ones(size, dtype=dtype), torch.ones(size, dtype=dtype))


def _moments(at: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    mean = share @ at
    return mean, (at - mean).T @ ((at - mean) * share[:, None])


def points_of(proposal: Split, count: int, *, seed: int) -> Tensor:
    """Return quasi-random points of a proposal, (count, K)."""
    even = count + count % 2
    return proposal.points(*heavy_points(even, len(proposal.loc), freedom=FREEDOM, seed=seed))[
        :count
    ]
