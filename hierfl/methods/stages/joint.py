"""The log density of z and all clients' standardized scalars, by all clients' rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import Quadratic, product
from hierfl.core.traced import Gradient
from hierfl.program.traces import Site
from hierfl.summaries.conditional import Proposal, normal_of
from hierfl.summaries.hierarchy import Factors, given
from hierfl.summaries.moving import MixingLine, laplace_at
from hierfl.summaries.packed_rows import PackedRows
from hierfl.summaries.surrogate import Surrogate

PADDED = 1 << 13  # scalars of points, beyond which a single one is not carried as many


class Standard(NamedTuple):
    """What clients' scalars are standardized by."""

    precision: Tensor  # (N, V, V) of factors
    shift: Tensor  # (N, V)
    line: MixingLine


def flat(standard: Standard) -> tuple[Tensor, ...]:
    """Return the tensors of what scalars are standardized by."""
    return (standard.precision, standard.shift, *standard.line)


class Joint:
    """The log density of z (K,) and the clients' standardized scalars e (N, E), by the rows."""

    def __init__(self, surrogate: Surrogate, rows: PackedRows, none: Factors, count: int) -> None:
        """Read what the density needs of N clients, for `count` points at a time."""
        self.surrogate, self.hierarchy, self.rows = surrogate, surrogate.hierarchy, rows
        self.none, self.count = none, count
        self.shared = len(self.hierarchy.reading.origin)
        self.own = self.hierarchy.normal_size + self.hierarchy.mixing_size
        self.same = bool((rows.line.rest >= self.hierarchy.reading.own_size).all())
        self.gradient = Gradient(self._value)

    @property
    def size(self) -> int:
        """K + N E."""
        return self.shared + self.rows.clients * self.own

    def at(self, x: Tensor, standard: Standard) -> tuple[Tensor, Tensor]:
        """Return log densities (S,) and gradients (S, K + N E) at points x, of which some at a time."""
        alone = len(x) == 1 and self.count * self.size > PADDED
        if alone or len(x) == self.count:
            return self.gradient(x, *flat(standard))
        values, slopes = [], []
        for some in x.split(self.count):
            padded = torch.cat([some, some[:1].expand(self.count - len(some), -1)])
            value, slope = self.gradient(padded, *flat(standard))
            values.append(value[: len(some)])
            slopes.append(slope[: len(some)])
        return torch.cat(values), torch.cat(slopes)

    def own_scalars(self, x: Tensor, standard: Standard) -> Tensor:
        """Return the clients' own scalars at points x, (S, N W)."""
        own: Tensor = self._terms(x, standard)[1][..., : self.hierarchy.reading.own_size]
        return own.flatten(1)

    def _terms(self, x: Tensor, by: Standard) -> tuple[Tensor, Tensor, Tensor]:
        """Return densities without rows (S,), v (S, N, V) and e (S, N, E) at points x."""
        e = x[:, self.shared :].reshape(len(x), self.rows.clients, self.own)

        def one(z: Tensor, e: Tensor) -> Tensor:
            return self._one(z, e, by)

        terms = self.surrogate.mapped(one, self.none, x[:, : self.shared], e, narrow=False)
        return terms[:, 0], terms[:, 1:].view(*e.shape[:2], -1), e

    def _value(self, x: Tensor, precision: Tensor, shift: Tensor, *line: Tensor) -> Tensor:
        by = Standard(precision, shift, MixingLine(*line))
        density, v, e = self._terms(x, by)
        at = v.movedim(0, 1)
        of_factor = ((by.shift[:, None] - 0.5 * product(at, by.precision)) * at).sum(-1)
        values = self.rows.values(at, same=self.same) - of_factor
        return density + values.sum(0) - 0.5 * e.square().sum((1, 2))

    def mixing(self, x: Tensor, standard: Standard) -> Tensor:
        """Return the clients' mixing parameters at points x, (S, N M)."""
        size = self.hierarchy.mixing_size
        if not size:
            return torch.zeros(len(x), 0)
        e = x[:, self.shared :].reshape(len(x), self.rows.clients, self.own)[..., :size]

        def one(z: Tensor, e: Tensor) -> Tensor:
            return self._proposal(z, standard).at(e).flatten()

        mixing: Tensor = self.surrogate.mapped(one, self.none, x[:, : self.shared], e, narrow=False)
        return mixing

    def _one(self, z: Tensor, e: Tensor, by: Standard) -> Tensor:
        """Return the log density of z and e with factors in the place of rows, and all v, (1 + N V,)."""
        h, size = self.hierarchy, self.hierarchy.mixing_size
        proposal = self._proposal(z, by) if size else None
        t = proposal.at(e[:, :size]) if proposal is not None else None
        sites, of_w = self._given(z, t, by)
        integral, mean, tril = normal_of(of_w, 1.0)
        w = mean + (tril @ e[:, size:, None])[..., 0]
        over = integral + h.log_mixing(sites, t)
        if proposal is not None and t is not None and h.mixing is not None:
            over, w = over - proposal.log_prob(t), h.mixing.whole(w, t)
        v = torch.cat([w, z[h.reading.shared].expand(len(w), -1)], 1)
        log_p = h.log_global(z, sites, without=()) + over.sum()
        return torch.cat([log_p[None], v.flatten()])

    def _given(
        self, z: Tensor, t: Tensor | None, by: Standard
    ) -> tuple[dict[str, Site], Quadratic]:
        """Return the sites at z and t (N, M), and p(w | z, t) times the clients' factors."""
        h = self.hierarchy
        row = h.batch(self.none.fields, 1 if t is None else len(t))
        sites = h.given(z, row, t)
        return sites, given(h, h.local(z, row, t, sites), z, by.precision, by.shift, t)

    def _proposal(self, z: Tensor, by: Standard) -> Proposal:
        """Return proposals of mixing parameters at z, by their density there."""

        def density(t: Tensor) -> Tensor:  # (N, 1, M) -> (N,)
            sites, of_w = self._given(z, t[:, 0], by)
            return self.hierarchy.log_mixing(sites, t[:, 0]) + of_w.log_integral()[0]

        return laplace_at(density, by.line.at(z))
