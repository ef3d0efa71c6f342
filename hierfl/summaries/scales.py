"""The density of a hierarchy's scales, everything else integrated out, and its gradient."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from hierfl.core.traced import Gradient
from hierfl.program.handlers import unchecked
from hierfl.summaries.hierarchy import Factors, of_means
from hierfl.summaries.surrogate import Surrogate


class Density:
    """The density of the scales and of t, with everything else integrated out; 0 beyond bounds."""

    def __init__(self, surrogate: Surrogate, factors: Factors, bounds: Tensor) -> None:
        self.surrogate, self.factors = surrogate, factors
        self.slopes: Tensor | None = None
        wide = torch.tensor([[-torch.inf], [torch.inf]]).expand(2, surrogate.mixed)
        self.low, self.high = torch.cat([bounds, wide], 1)
        hierarchy = surrogate.hierarchy
        if hierarchy.steady:
            batch, mixing = hierarchy.batch(factors.fields), hierarchy.mixing
            t = None if mixing is None else mixing.center.expand(batch.num_clients, -1)
            with unchecked():
                self.slopes = hierarchy.slopes_at(hierarchy.reading.origin.double(), batch, t)

    def at(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log p (S,), and mean (S, Km) and covariance (S, Km, Km) of m given x (S, Ks + N M)."""
        far = ((x < self.low) | (x > self.high) | ~x.isfinite()).any(1)
        near = x.nan_to_num().clamp(self.low, self.high)
        hierarchy = self.surrogate.hierarchy

        def one(at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            s, t = self.surrogate.parts(at, len(hierarchy.outside))
            normal = of_means(hierarchy, s, self.factors, t, self.slopes)
            value, covariance = normal.log_integral()
            return value, covariance @ normal.shift, covariance

        same_prior = not hierarchy.fields and not self.surrogate.mixed
        value, mean, covariance = self.surrogate.mapped(one, self.factors, near, narrow=same_prior)
        return torch.where(far, -torch.inf, value), mean, covariance

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p (S,) and its gradient (S, Ks + N M); clients and points are independent."""
        gradient, tensors = self._recorded()
        return gradient(x, *tensors)

    def seconds(self, x: Tensor, times: int) -> float:
        """Return about how long so many gradients at points take, by the counted work of one."""
        gradient, tensors = self._recorded()
        return times * gradient.seconds(x, *tensors)

    def _recorded(self) -> tuple[Gradient, list[Tensor]]:
        """Return the gradient, which other factors share, and the tensors that it is a function of."""
        leaves, spec = tree_flatten((self.factors, self.slopes, self.low, self.high))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        surrogate, none = self.surrogate, [None] * len(leaves)

        def log_p(x: Tensor, *tensors: Tensor) -> Tensor:
            own = list[Any](none)
            for i, v in zip(places, tensors, strict=True):
                own[i] = v
            density = copy(self)
            density.factors, density.slopes, density.low, density.high = tree_unflatten(own, spec)
            return density.at(x)[0]

        name = f"scales {places}"
        gradient = surrogate.gradients.setdefault(name, Gradient(log_p))
        return gradient, [leaves[i] for i in places]
