"""The log density of z and all clients' standardized scalars, or of z alone, by all clients' rows.

Where a client has one scalar e of its own, the density of z alone is a product over clients of
Gauss-Hermite sums about the mode of e given z. Clients of equal rows are computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from hierfl.core.gaussians import Quadratic, dot, times, times_factor
from hierfl.core.process import replaced
from hierfl.core.traced import Gradient
from hierfl.methods.stages.centering import Centering, uncentered
from hierfl.methods.stages.scaled_means import ScaledMeans
from hierfl.program.carried import OF_MANY_DRAWS
from hierfl.program.handlers import unchecked
from hierfl.program.traces import Site
from hierfl.summaries.conditional import Proposal
from hierfl.summaries.growth import Growth, no_growth
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.mixing import precision_of
from hierfl.summaries.moving import MixingLine, laplace_at
from hierfl.summaries.packed_rows import PackedRows
from hierfl.summaries.surrogate import AT_ONCE, Surrogate

# where the mode of a client's only scalar is looked for, in sds by its factor; Newton steps from there,
# by differences; the longest, and the flattest curvature
GRID, STEPS, STEP, LONGEST, FLATTEST = (-4.0, -2.0, 0.0, 2.0, 4.0), 2, 0.05, 2.0, 0.1
LOCATING = len(GRID) + 3 * STEPS  # scalars of a client at which it is computed for that
PADDED = 3000  # scalars of points, beyond which a single one is not carried as many


class Standard(NamedTuple):
    """What clients' scalars w are standardized by: factors, as functions of u; and how z is centered."""

    precision: Tensor  # (N, W, W), at the growth's origin
    cross: Tensor  # (N, W, U), by which the shift of w moves with u
    shift: Tensor  # (N, W), at u = 0
    growth: Growth
    line: MixingLine
    centering: Centering

    def at(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the precision (N, W, W) and the shift (N, W) of w at u (U,)."""
        return self.growth.of(self.precision, self.cross, self.shift, u)


def standard_of(
    precision: Tensor, shift: Tensor, line: MixingLine, own: int, growth: Growth | None = None
) -> Standard:
    """Return what standardizes W = `own` scalars by factors (N, V, V) and (N, V).

    What these say of u alone cancels.
    """
    inside, cross = precision[:, :own].tensor_split([own], 2)
    growth = no_growth(len(shift), own) if growth is None else growth
    return Standard(inside, cross, shift[:, :own], growth, line, uncentered())


NONE = torch.zeros(0)
STRUCTURE = tree_structure(
    Standard(NONE, NONE, NONE, Growth(*[NONE] * 5), MixingLine(*[NONE] * 3), uncentered())
)


def flat(standard: Standard) -> tuple[Tensor, ...]:
    """Return the tensors of what scalars are standardized by."""
    return tuple(tree_leaves(standard))


class ScalarNodes(NamedTuple):
    """Nodes of each client's only scalar, and how many equal clients each stands for."""

    at: Tensor  # (G,) standard normal
    weights: Tensor  # (G,)
    times: Tensor  # (N,)


class Joint:
    """The log density of z (K,) and the clients' standardized scalars e (N, E), by the rows.

    With `nodes` of e it is that of z alone.
    """

    def __init__(
        self,
        surrogate: Surrogate,
        rows: PackedRows,
        none: Factors,
        count: int,
        nodes: ScalarNodes | None = None,
    ) -> None:
        """Read what the density needs of N clients, for `count` points at a time."""
        self.surrogate, self.hierarchy, self.rows = surrogate, surrogate.hierarchy, rows
        self.nodes = nodes
        self.none, self.count = none, count
        self.shared = len(self.hierarchy.reading.origin)
        self.own = self.hierarchy.normal_size + self.hierarchy.mixing_size
        self.means: ScaledMeans | None = ScaledMeans(self.hierarchy)
        self.gradient = Gradient(self._value)

    @property
    def has_own(self) -> bool:
        """Whether clients' scalars are among the coordinates."""
        return self.own > 0 and self.nodes is None

    @property
    def size(self) -> int:
        """K + N E, or K."""
        return self.shared + (self.rows.clients * self.own if self.has_own else 0)

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

    def values(self, x: Tensor, standard: Standard) -> Tensor:
        """Return log densities (S,) at points x."""
        return self._value(x, *flat(standard))

    def own_scalars(self, x: Tensor, standard: Standard) -> Tensor:
        """Return the clients' own scalars at points x, (S, N W); none where they are summed over."""
        if self.nodes is not None:
            return x[:, :0]
        return self._terms(self._natural(x, standard)[0], standard)[1].flatten(1)

    def z_of(self, x: Tensor, standard: Standard) -> Tensor:
        """Return z (S, K) at points x."""
        z: Tensor = self._natural(x, standard)[0][:, : self.shared]
        return z

    def values_of(self, x: Tensor, standard: Standard) -> Tensor:
        """Return the values of global sites at points x, (S, entries)."""
        block = self.hierarchy.program.latents.global_block
        values = block.values_of(self.z_of(x, standard)).values()
        return torch.cat([x[:, :0], *(value.reshape(len(x), -1) for value in values)], 1)

    def x_of(self, z: Tensor, standard: Standard) -> Tensor:
        """Return the coordinates (S, K) of z (S, K)."""
        return standard.centering.back(z if self.means is None else self.means.back(z))

    def _natural(self, x: Tensor, standard: Standard) -> tuple[Tensor, Tensor | float]:
        """Return points x with z in place of its coordinates, and the log of how much volume grows, (S,)."""
        x, centered = standard.centering.at(x)
        if self.means is None:
            return x, centered
        z, volume = self.means.at(x[:, : self.shared])
        return torch.cat([z, x[:, self.shared :]], 1), volume + centered

    def precisions(self, x: Tensor) -> Tensor:
        """Return the prior's precisions of x (K...,): of Normal sites, and 1 of what the prior has standardized."""
        h, precision = self.hierarchy, torch.ones(len(x))
        if h.linear_sites and self.means is not None:
            z = self.means.at(x[None, : self.shared])[0][0]
            with unchecked():
                sites = h.sites(z, torch.zeros(h.reading.own_size), h.row)
            precision[h.inside] = precision_of(h.linear_sites, sites)[0][0].diagonal()
            precision[h.positions({site.name for site in self.means.sites})[0]] = 1.0
        return precision

    def from_own(self, z: Tensor, own: Tensor) -> Tensor:
        """Return points x of a plain joint, at z (S, K) and what `own_scalars` returns, (S, N W)."""
        own = own.view(len(z), self.rows.clients, -1)
        return torch.cat([z, torch.vmap(self.hierarchy.local_vectors)(own, z).flatten(1)], 1)

    def own_parts(self, x: Tensor) -> Tensor:
        """Return the clients' parts of points x, e (S, N, E)."""
        return x[:, self.shared :].reshape(len(x), self.rows.clients, self.own)

    def _terms(self, x: Tensor, by: Standard) -> tuple[Tensor, Tensor]:
        """Return densities without rows (S,), and w (S, N, W) at points x."""
        e = self.own_parts(x)

        def density(z: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
            log_z, over, w = self._one(z, e, by)
            return log_z + over.sum(), w

        return self._mapped(density, x, e)

    def _mapped(self, function: Callable[..., Any], x: Tensor, e: Tensor) -> Any:
        """Return a function of z and e at all points x (S, K...) and e (S, ...), some at once."""
        at_once = AT_ONCE // max(1, e[0].numel() * (self.own + 1))
        chunk = min(max(1, at_once), len(e))
        with unchecked(), replaced(OF_MANY_DRAWS):
            return torch.vmap(function, chunk_size=chunk)(x[:, : self.shared], e)

    def _value(self, x: Tensor, *of_standard: Tensor) -> Tensor:
        standard = tree_unflatten(of_standard, STRUCTURE)
        x, volume = self._natural(x, standard)
        if self.nodes is not None:
            return volume + self._summed(x, standard, self.nodes)
        density, w = self._terms(x, standard)
        return volume + density + self._of_rows(w, x).sum(1)

    def _of_rows(self, w: Tensor, z: Tensor) -> Tensor:
        """Return log likelihoods (S, N) at w (S, N, W) and z (S, K...)."""
        u = z[:, self.hierarchy.reading.shared]
        return self.rows.values_of(w.movedim(0, 1), u).mT

    def _summed(self, z: Tensor, by: Standard, nodes: ScalarNodes) -> Tensor:
        """Return the log density of z (S, K), (S,)."""
        with torch.no_grad():
            loc, scale = self._modes(z.detach(), by)
        x = nodes.at[:, None]
        log_z, log_p = self._at_scalars(z, loc + scale * x, by)
        log_weights = nodes.weights.log()[:, None] + 0.5 * x.square() + scale.log()
        return log_z + (log_p + log_weights).logsumexp(1) @ nodes.times

    def _modes(self, z: Tensor, by: Standard) -> tuple[Tensor, Tensor]:
        """Return about the mode of each client's scalar given z (S, K), and its sd there, (S, 1, N)."""
        grid = torch.tensor(GRID, dtype=z.dtype)
        e = grid[:, None].expand(len(z), -1, self.rows.clients)
        log_p = self._at_scalars(z, e, by)[1].nan_to_num(nan=-torch.inf)
        loc = e.gather(1, log_p.argmax(1, keepdim=True))
        for _ in range(STEPS):
            near = torch.cat([loc - STEP, loc, loc + STEP], 1)
            below, here, above = self._at_scalars(z, near, by)[1].split(1, 1)
            curvature = (2.0 * here - below - above).nan_to_num() / STEP**2
            curvature = curvature.clamp(min=FLATTEST)
            move = (above - below).nan_to_num() / (2.0 * STEP * curvature)
            loc = loc + move.clamp(-LONGEST, LONGEST)
        return loc, curvature.rsqrt()

    def _at_scalars(self, z: Tensor, e: Tensor, by: Standard) -> tuple[Tensor, Tensor]:
        """Return log p(z) (S,), and the clients' log densities at scalars e (S, G, N), at z (S, K)."""
        many = e.shape[1]

        def densities(z: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            log_z, over, w = torch.vmap(lambda e: self._one(z, e[:, None], by))(e)
            return log_z[0], over, w

        log_z, over, w = self._mapped(densities, z, e)
        of_rows = self._of_rows(w.flatten(0, 1), z.repeat_interleave(many, 0))
        return log_z, over + of_rows.view(e.shape)

    def mixing(self, x: Tensor, standard: Standard) -> Tensor:
        """Return the clients' mixing parameters at points x, (S, N M)."""
        size = self.hierarchy.mixing_size
        if not size:
            return torch.zeros(len(x), 0)
        x, _ = self._natural(x, standard)
        e = self.own_parts(x)[..., :size]

        def one(z: Tensor, e: Tensor) -> Tensor:
            factor = standard.at(z[self.hierarchy.reading.shared])
            return self._proposal(z, standard, factor).at(e).flatten()

        mixing: Tensor = self._mapped(one, x, e)
        return mixing

    def _one(self, z: Tensor, e: Tensor, by: Standard) -> tuple[Tensor, Tensor, Tensor]:
        """Return log p(z) (), the log densities of e (N,) without rows, and w (N, W)."""
        h, size = self.hierarchy, self.hierarchy.mixing_size
        factor = by.at(z[h.reading.shared])
        proposal = self._proposal(z, by, factor) if size else None
        t = proposal.at(e[:, :size]) if proposal is not None else None
        sites, of_w = self._given(z, t, factor)
        integral, mean, tril = of_w.normal()
        w = mean + (tril @ e[:, size:, None])[..., 0]
        over = integral + h.log_mixing(sites, t) - 0.5 * e.square().sum(1)
        if proposal is not None and t is not None and h.mixing is not None:
            over, w = over - proposal.log_prob(t), h.mixing.whole(w, t)
        precision, shift = factor
        over = over - dot(shift - 0.5 * times(precision, w), w)
        return h.log_global(z, sites, without=()), over.expand(len(w)), w

    def _given(
        self, z: Tensor, t: Tensor | None, factor: tuple[Tensor, Tensor]
    ) -> tuple[dict[str, Site], Quadratic]:
        """Return the sites at z and t (N, M), and p(w | z, t) times the clients' factors."""
        h = self.hierarchy
        row = h.batch(self.none.fields, 1 if t is None else len(t))
        sites = h.given(z, row, t)
        (precision, shift), others = factor, z[:0]
        if h.mixing is not None and t is not None:
            at, others = h.arrangement[: h.reading.own_size], h.mixing.sampled_part(t)
            precision, shift = precision[:, at][:, :, at], shift[:, at]
        return sites, times_factor(h.local(z, row, t, sites), others, precision, shift)

    def _proposal(self, z: Tensor, by: Standard, factor: tuple[Tensor, Tensor]) -> Proposal:
        """Return proposals of mixing parameters at z, by their density there."""

        def density(t: Tensor) -> Tensor:  # (N, 1, M) -> (N,)
            sites, of_w = self._given(z, t[:, 0], factor)
            return self.hierarchy.log_mixing(sites, t[:, 0]) + of_w.log_integral()

        return laplace_at(density, by.line.at(z))


class PlainJoint(Joint):
    """The log density of z and the clients' unconstrained scalars as the program has them.

    It takes a tenth of the operations, and mixes as well where no factor is near the likelihoods.
    """

    def __init__(self, surrogate: Surrogate, rows: PackedRows, none: Factors, count: int) -> None:
        """Read what the density needs of N clients, for `count` points at a time."""
        super().__init__(surrogate, rows, none, count)
        self.own, self.means = self.hierarchy.reading.own_size, None

    def mixing(self, x: Tensor, standard: Standard) -> Tensor:
        """Return the clients' mixing parameters at points x, (S, N M); none is of a scattered site."""
        mixing = self.hierarchy.mixing
        own = self.own_parts(x)
        return (own[..., :0] if mixing is None else own[..., mixing.outside]).flatten(1)

    def _one(self, z: Tensor, e: Tensor, by: Standard) -> tuple[Tensor, Tensor, Tensor]:
        h, effects = self.hierarchy, self.hierarchy.reading.effects
        batch = h.batch(self.none.fields, len(e))
        sites = h.sites(z, e, batch)
        over, w = h.log_local(sites, e), e
        if effects is not None:
            moved, scale = effects.at(z)
            w = moved + e @ scale.mT
        return h.log_global(z, sites, without=()), over, w
