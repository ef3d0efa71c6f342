"""The log density of z and all clients' standardized scalars, by all clients' rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hierfl.core.gaussians import times
from hierfl.core.graphs import graph_of
from hierfl.laplace.trials import nearly_equal
from hierfl.summaries.conditional import Proposal, normal_of
from hierfl.summaries.hierarchy import Factors, given
from hierfl.summaries.packed_rows import PackedRows
from hierfl.summaries.surrogate import Surrogate

COMPARED, AWAY = 2, 0.5  # points at which recorded operations and the program agree


class Joint:
    """The log density of z (K,) and the clients' standardized scalars e (N, E), by the rows."""

    def __init__(
        self,
        surrogate: Surrogate,
        rows: PackedRows,
        factors: Factors,
        proposal: Proposal | None,
    ) -> None:
        self.surrogate, self.hierarchy, self.rows = surrogate, surrogate.hierarchy, rows
        self.factors, self.proposal = factors, proposal
        self.shared = len(self.hierarchy.reading.origin)
        self.own = self.hierarchy.normal_size + self.hierarchy.mixing_size
        self.one = self._recorded() or self._one

    @property
    def size(self) -> int:
        """K + N E."""
        return self.shared + self.rows.clients * self.own

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return log densities (S,) and gradients (S, K + N E)."""
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            value = self.value(x)
            (slope,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), slope

    def value(self, x: Tensor) -> Tensor:
        """Return log densities (S,)."""
        e = x[:, self.shared :].reshape(len(x), self.rows.clients, self.own)
        terms = self.surrogate.mapped(self.one, self.factors, x[:, : self.shared], e, narrow=False)
        values = self.rows.values(terms[:, 1:].view(*e.shape[:2], -1).movedim(0, 1))
        return terms[:, 0] + values.sum(0) - 0.5 * e.square().sum((1, 2))

    def _recorded(self) -> Callable[..., Tensor] | None:
        """Return `_one` as a list of operations, which is faster than a program; None if it has branches."""
        g = torch.Generator().manual_seed(0)
        z, own = self.hierarchy.reading.origin.double(), (self.rows.clients, self.own)
        graph = graph_of(self._one, z, torch.zeros(own))
        for _ in range(COMPARED if graph is not None else 0):
            at = z + AWAY * torch.randn(len(z), generator=g), torch.randn(own, generator=g)
            if graph is None or not nearly_equal(graph(*at), self._one(*at)):
                return None
        return graph

    def _one(self, z: Tensor, e: Tensor) -> Tensor:
        """Return the log density of z and e without rows, over that of the factors, and all v, (1 + N V,)."""
        h, factor = self.hierarchy, (self.factors.precision, self.factors.shift)
        t, size = None, h.mixing_size
        if self.proposal is not None:
            t = self.proposal.at(e[:, :size])
        row = h.batch(self.factors.fields, 1 if t is None else len(t))
        sites = h.given(z, row, t)
        integral, mean, tril = normal_of(given(h, h.local(z, row, t, sites), z, *factor, t), 1.0)
        w = mean + (tril @ e[:, size:, None])[..., 0]
        over = integral + h.log_mixing(sites, t)
        if t is not None and self.proposal is not None and h.mixing is not None:
            over = over - self.proposal.log_prob(t)
            w = h.mixing.whole(w, t)
        v = torch.cat([w, z[h.reading.shared].expand(len(w), -1)], 1)
        log_factor = ((factor[1] - 0.5 * times(factor[0], v)) * v).sum(1)
        log_p = h.log_global(z, sites, without=()) + (over - log_factor).sum()
        return torch.cat([log_p[None], v.flatten()])
