"""Coordinates of global sites that are Normal at scales which are parameters themselves.

    m = mean(other sites) + root(scales) e,    m ~ Normal(mean, root root')

The density of m and its scales is infinite where a scale is 0, so that its mode has no mass; that of
e and the scales is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hierfl.core.gaussians import inverse_root, times
from hierfl.core.process import replaced
from hierfl.program.carried import OF_MANY_DRAWS
from hierfl.program.handlers import unchecked
from hierfl.program.sites import LatentSite
from hierfl.program.traces import Site
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.mixing import means_of, precision_of

AWAY = 0.5  # how far scales are moved to see whose priors they scale


@dataclass(frozen=True, eq=False)
class ScaledMeans:
    """The change from coordinates x (K,) to z (K,), of which B numbers are scaled by others."""

    hierarchy: Hierarchy

    @cached_property
    def sites(self) -> tuple[LatentSite, ...]:
        """The sites that other sites scale."""
        h, origin = self.hierarchy, self.hierarchy.reading.origin.double()
        away = origin.index_add(0, h.outside, torch.full_like(origin, AWAY)[h.outside])
        here, there = (self._prior(z) for z in (origin, away))
        return tuple(
            site
            for site in h.linear_sites
            if not torch.equal(*(precision_of((site,), of)[0] for of in (here, there)))
        )

    @cached_property
    def _order(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positions in z of the scaled numbers, of the others, and the order that joins them."""
        inside, outside = self.hierarchy.positions({site.name for site in self.sites})
        return inside, outside, torch.argsort(torch.cat([inside, outside]))

    @cached_property
    def _depth(self) -> int:
        """How many scaled sites are at most in a row, of which each is the mean of the next."""
        origin = self.hierarchy.reading.origin.double()
        x = origin + AWAY * torch.randn(len(origin), generator=torch.Generator().manual_seed(0))
        placed = [self._placed(x, depth)[0] for depth in range(len(self.sites) + 1)]
        return next(i for i, z in enumerate(placed) if torch.equal(z, placed[-1]))

    def at(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return z (S, K) at x (S, K), and by how much the log of volume grows, (S,)."""
        if not self.sites:
            return x, x.new_zeros(len(x))
        depth = self._depth
        z, growth = _mapped(lambda x: self._placed(x, depth), x)
        return z, growth

    def _placed(self, x: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Return z (K,) at x (K,), by means so deep, and by how much the log of volume grows, ()."""
        inside, outside, order = self._order
        z, growth = x, x.sum() * 0.0
        for _ in range(depth):
            loc, root = self._normal(z)
            z = torch.cat([loc + times(root, x[inside]), x[outside]])[order]
            growth = root.diagonal().log().sum()
        return z, growth

    def back(self, z: Tensor) -> Tensor:
        """Return x (S, K) at z (S, K)."""
        if not self.sites:
            return z
        inside, outside, order = self._order

        def one(z: Tensor) -> Tensor:
            loc, root = self._normal(z)
            e = torch.linalg.solve_ex(root, z[inside] - loc).result
            return torch.cat([e, z[outside]])[order]

        x: Tensor = _mapped(one, z)
        return x

    def _normal(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prior mean (B,) of the scaled sites at z (K,), and a root (B, B) of their covariance."""
        prior = self._prior(z)
        (root,), _ = inverse_root(precision_of(self.sites, prior)[0])
        return means_of(self.sites, prior)[0], root

    def _prior(self, z: Tensor) -> dict[str, Site]:
        h = self.hierarchy
        with unchecked():
            return h.sites(z, torch.zeros(h.reading.own_size, dtype=z.dtype), h.row)


def _mapped(function: Callable[[Tensor], Any], points: Tensor) -> Any:
    with unchecked(), replaced(OF_MANY_DRAWS):
        return torch.vmap(function)(points)
