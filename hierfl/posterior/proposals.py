"""Where the global sites of a guide are put: as it draws them, or at points of a Student t fitted to weighted draws.

A guide's Gaussian global sites, side by side, are a vector of coordinates x (K,): its own density is known there, so that points of
any other proposal have known weights too. Adaptive importance sampling: Cappe, Douc, Guillin, Marin and Robert 2008, Statistics and
Computing 18; a multivariate t, since a Gaussian of too small a spread has weights without a variance.
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

FREEDOM = 7.0  # degrees of the t
COUNTS = 5  # as many effective draws a coordinate does the proposal before count for, when it is fitted anew
GAUSSIAN = (dist.Normal, dist.MultivariateNormal, dist.LowRankMultivariateNormal)


class Coordinates(Messenger):
    """Reads the coordinates of a guide's Gaussian global sites as it draws them, or puts them at a point (K,) that is given."""

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
        """X, (K,)."""
        return torch.cat(self.read) if self.read else torch.zeros(0)

    def log_q(self) -> Tensor:
        """Log density of x under the guide, ()."""
        return torch.stack(self.densities).sum() if self.densities else torch.zeros(())


def gaussian(msg: Any) -> tuple[Any, list[Any]] | None:
    """The Gaussian that a global latent site is a transform of, and the transforms; None for any other site."""
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
    """A t with the mean and covariance of weighted draws (S, K), drawn to the proposal before where few of them are effective."""
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
    """Quasi-random points of a proposal, (count, K)."""
    even = count + count % 2
    return proposal.points(*heavy_points(even, len(proposal.loc), freedom=FREEDOM, seed=seed))[
        :count
    ]


def log_density(proposal: Split, at: Tensor) -> Tensor:
    """Log density of a proposal at points (S, K): (S,)."""
    return proposal.log_prob(at, FREEDOM)
