"""Proposals for the global sites: the guide's own draws, or points of a Student t fitted to weighted draws.

A guide's Gaussian global sites, concatenated, are a vector of coordinates x (K,). Its density under the guide
is known, so points of any other proposal have known weights as well. This is adaptive importance sampling
(Cappe, Douc, Guillin, Marin and Robert 2008, Statistics and Computing 18) with a multivariate t, because a
Gaussian that is too narrow has weights of infinite variance.
"""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import TransformedDistribution

from hierfl.core.importance_sampling import Split, Weights, heavy_points
from hierfl.program.traces import in_clients, is_latent

FREEDOM = 7.0  # degrees of freedom of the t
COUNTS = 5  # effective draws per coordinate that the previous proposal counts for in a refit
GAUSSIAN = (dist.Normal, dist.MultivariateNormal, dist.LowRankMultivariateNormal)


class Coordinates(Messenger):
    """Read the coordinates of a guide's Gaussian global sites as they are drawn, or set them to a given point (K,)."""

    def __init__(self, point: Tensor | None) -> None:
        super().__init__()
        self.point, self.used = point, 0
        self.read: list[Tensor] = []
        self.densities: list[Tensor] = []

    def _pyro_sample(self, msg: Any) -> None:
        found = gaussian(msg)
        if self.point is None or found is None:
            return
        base, transforms = found
        shape = torch.Size((*base.batch_shape, *base.event_shape))
        value = self.point[self.used : self.used + shape.numel()].reshape(shape)
        self.used += shape.numel()
        for transform in transforms:
            value = transform(value)
        msg["value"], msg["done"] = value, True

    def _pyro_post_sample(self, msg: Any) -> None:
        found = gaussian(msg)
        if found is None:
            return
        (base, transforms), value = found, msg["value"]
        for transform in reversed(transforms):
            value = transform.inv(value)
        self.read.append(value.reshape(-1))
        self.densities.append(base.log_prob(value).sum())

    def vector(self) -> Tensor:
        """Return the coordinates x, (K,)."""
        return torch.cat(self.read) if self.read else torch.zeros(0)

    def log_q(self) -> Tensor:
        """Return the log density of x under the guide, ()."""
        return torch.stack(self.densities).sum() if self.densities else torch.zeros(())


def gaussian(msg: Any) -> tuple[Any, list[Any]] | None:
    """Return the Gaussian that a global latent site transforms, and the transforms; None for any other site."""
    if msg["type"] != "sample" or not is_latent(msg) or in_clients(msg):
        return None
    fn = msg["fn"]
    transforms: list[Any] = []
    while not isinstance(fn, GAUSSIAN) and hasattr(fn, "base_dist"):
        if isinstance(fn, TransformedDistribution):
            transforms = [*fn.transforms, *transforms]
        fn = fn.base_dist
    return (fn, transforms) if isinstance(fn, GAUSSIAN) else None


def refitted(at: Tensor, weights: Weights, before: Split | None) -> Split:
    """Fit a t to the mean and covariance of weighted draws, shrunk towards the previous proposal.

    Args:
        at: (S, K) coordinates of the draws.
        weights: of the draws; the fewer are effective, the stronger the shrinkage.
        before: the previous proposal; None: the unweighted draws.
    """
    size, share, given = at.shape[1], weights.log.double().exp(), at.dtype
    at = at.double()
    mean, covariance = _moments(at, share)
    loc, spread = (
        _moments(at, torch.full_like(share, 1.0 / len(share)))
        if before is None
        else (before.loc.double(), (before.tril @ before.tril.T).double())
    )
    trust = weights.effective / (weights.effective + COUNTS * size)
    off = mean - loc
    both = trust * covariance + (1.0 - trust) * (spread + trust * torch.outer(off, off))
    loc, tril = (loc + trust * off).to(given), torch.linalg.cholesky(both).to(given)
    return Split(loc, tril, torch.ones(size, dtype=given), torch.ones(size, dtype=given))


def _moments(at: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    mean = share @ at
    return mean, (at - mean).T @ ((at - mean) * share[:, None])


def points_of(proposal: Split, count: int, *, seed: int) -> Tensor:
    """Return quasi-random points of a proposal, (count, K)."""
    even = count + count % 2
    return proposal.points(*heavy_points(even, len(proposal.loc), freedom=FREEDOM, seed=seed))[
        :count
    ]


def log_density(proposal: Split, at: Tensor) -> Tensor:
    """Return the log density of a proposal at points (S, K): (S,)."""
    return proposal.log_prob(at, FREEDOM)
