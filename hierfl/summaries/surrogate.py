"""The surrogate posterior: the prior times the clients' factors. The server evaluates it by itself, without a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyro
import torch
from torch import Tensor
from torch._functorch.compile_utils import fx_graph_cse
from torch.func import grad_and_value
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from hierfl.program.few_rows import double_precision
from hierfl.program.sites import LatentSite
from hierfl.summaries.chains import Density
from hierfl.summaries.hierarchy import Factors, Hierarchy

# logs of scales near 0 at which a prior density is compared, and the difference, in nats, that counts as none
NEAR, FLAT = (-7.0, -14.0), 0.1
SMALLEST, LARGEST = 1e-8, 30.0  # of a scale, and of its log
AT_ONCE = 1 << 22  # draws x clients x (D + 1)^2 numbers that are carried at once


@dataclass(frozen=True, eq=False)
class Surrogate:
    """The surrogate posterior of the global numbers.

    Args:
        hierarchy: the program's prior.
    """

    hierarchy: Hierarchy

    @cached_property
    def even(self) -> Tensor:
        """Which numbers of s are logs of a scale that may be 0, (Ks,) bool.

        Such a number is sampled as a signed scale x, s = log|x|: an even density, smooth at 0, where that of s
        would have a long tail. A scale may be 0 if its prior density there is finite and above 0.
        """
        block, hierarchy = self.hierarchy.program.latents.global_block, self.hierarchy
        logs = [flag for site in block.sites for flag in [_is_exp(site)] * site.size]
        with double_precision(), torch.no_grad(), pyro.validation_enabled(False):
            zero = torch.zeros(hierarchy.reading.own_size)

            def log_p(z: Tensor) -> Tensor:
                return hierarchy.log_global(z, hierarchy.sites(z, zero, hierarchy.row), without=())

            def at_nought(j: int) -> bool:
                z = hierarchy.reading.origin.double().clone()
                near, nearer = (log_p(z.index_fill(0, torch.tensor(j), at)) - at for at in NEAR)
                return bool((near - nearer).abs() < FLAT)

            flags = [logs[j] and at_nought(j) for j in hierarchy.outside.tolist()]
        return torch.tensor(flags, dtype=torch.bool)

    def to_signed(self, s: Tensor) -> Tensor:
        """Return the coordinates x that are sampled, of s (..., Ks)."""
        return torch.where(self.even, s.clamp(max=LARGEST).exp(), s)

    def from_signed(self, x: Tensor) -> Tensor:
        """Return s of the coordinates that are sampled (..., Ks)."""
        return torch.where(self.even, x.abs().clamp(min=SMALLEST).log(), x)

    def density(self, factors: Factors, chains: int) -> Density:
        """Return the log density of x, with m integrated out, and its gradient at the points of C chains, (C, Ks)."""
        names = self.hierarchy.fields
        inputs = (factors.precision, factors.shift, *(factors.fields[name] for name in names))
        if chains not in self._graphs:
            self._graphs[chains] = self._traced(chains, inputs)
        graph = self._graphs[chains]

        def at(x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad(), pyro.validation_enabled(False):
                value, slope = graph(x, *inputs)
            return value, slope

        return at

    @cached_property
    def _graphs(self) -> dict[int, Callable[..., Any]]:
        """Traced densities, by the number of chains: the factors are inputs."""
        return {}

    def _traced(self, chains: int, inputs: tuple[Tensor, ...]) -> Callable[..., Any]:
        """Trace the density and its gradient into a graph, without the program's Python around it."""
        start = self.to_signed(self.hierarchy.reading.origin[self.hierarchy.outside].double())

        def evaluate(x: Tensor, precision: Tensor, shift: Tensor, *fields: Tensor) -> Any:
            given = dict(zip(self.hierarchy.fields, fields, strict=True))
            factors = Factors(precision, shift, given)

            def one(x: Tensor) -> Tensor:
                s = self.from_signed(x)
                jacobian = torch.where(self.even, s, 0.0).sum()
                return self.hierarchy.of_means(s, factors).log_integral()[0] - jacobian

            slope, value = torch.vmap(grad_and_value(one))(x)
            return value, slope

        with pyro.validation_enabled(False), torch.no_grad():
            return _graph_of(evaluate, start.expand(chains, -1).clone(), *inputs)

    def with_means(self, scales: Tensor, normal: Tensor, factors: Factors) -> Tensor:
        """Return draws of z (S, K): s as given, m drawn given s.

        Args:
            scales: (S, Ks) draws of s.
            normal: (S, Km) standard normal numbers.
            factors: of the clients.
        """

        def one(s: Tensor, e: Tensor) -> Tensor:
            of_means = self.hierarchy.of_means(s, factors)
            _, covariance = of_means.log_integral()
            tril = torch.linalg.cholesky_ex(covariance).L
            return self.hierarchy.whole(covariance @ of_means.shift + tril @ e, s)

        return self._mapped(one, factors, scales, normal)

    def log_marginals(self, draws: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
        """Return log p(z) and each client's log integral of p(w | z) factor(v) over w, at draws of z (S, K).

        Returns:
            (S,) and (S, N).
        """

        def one(z: Tensor) -> tuple[Tensor, Tensor]:
            batch = self.hierarchy.batch(factors.fields)
            normal = self.hierarchy.local(z, batch)
            given = self.hierarchy.given(normal, z, factors.precision, factors.shift)
            zero = torch.zeros(self.hierarchy.reading.own_size, dtype=z.dtype)
            sites = self.hierarchy.sites(z, zero, self.hierarchy.row)
            log_z = self.hierarchy.log_global(z, sites, without=())
            return log_z, given.log_integral()[0].expand(len(factors.shift))

        found: tuple[Tensor, Tensor] = self._mapped(one, factors, draws)
        return found

    def moments(self, draws: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
        """Return means (S, C, V) of v given z, and variances (S, C, D) of its local part, under the prior."""
        shared = self.hierarchy.reading.shared

        def one(z: Tensor) -> tuple[Tensor, Tensor]:
            normal = self.hierarchy.local(z, self.hierarchy.batch(factors.fields))
            covariance = torch.linalg.inv_ex(normal.precision).inverse
            u = z[shared].expand(len(normal.mean), -1)
            return torch.cat([normal.mean, u], 1), covariance

        found: tuple[Tensor, Tensor] = self._mapped(one, factors, draws)
        return found

    def _mapped(self, one: Any, factors: Factors, *draws: Tensor) -> Any:
        size = len(factors.shift) * (factors.shift.shape[1] + 1) ** 2
        at_once = max(1, AT_ONCE // max(1, size))
        with torch.no_grad(), pyro.validation_enabled(False):
            return torch.vmap(one, chunk_size=at_once)(*draws)


def _graph_of(function: Callable[..., Any], *inputs: Tensor) -> Callable[..., Any]:
    """Return the graph of a function, or the function itself where it cannot be traced.

    A program that looks at the values of its rows (`one_hot` does) has no graph, and runs as it is.
    """
    try:
        graph = make_fx(function)(*inputs)
    except (RuntimeError, TypeError, ValueError):
        return function
    graph.graph.eliminate_dead_code()
    return GraphModule(graph, fx_graph_cse(graph.graph))


def _is_exp(site: LatentSite) -> bool:
    """Return whether the unconstrained numbers of a site are the logs of its values."""
    free = torch.linspace(-2.0, 2.0, site.size).view(site.free_start.shape)
    value = site.transform(free)
    return value.shape == free.shape and torch.allclose(value, free.exp())
