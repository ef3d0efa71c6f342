"""The hierarchy above the clients' factors, kept exact: its prior, and closed-form integrals.

The global vector z has two kinds of entries. Given s ("scales": all that is not linear), the others
m ("means") and the local sites w are jointly Normal:

    m | s ~ Normal,    w_k | z ~ Normal(a_k + M_k m, A^-1),    a, M, A functions of s

If some local parameters are not Normal, this holds given each client's mixing parameters t_k, and w
are the other local parameters. With factors exp(eta . v - v' Lambda v / 2) in v = (w, u), where u
are entries of z (and of t), w integrates out client by client, and then m. This leaves a density of
the scales s, and of all t.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from hierfl.core.gaussians import Normal, Quadratic, slopes_along, times_factor, without_own
from hierfl.core.trees import tree_class
from hierfl.data.batch import ClientBatch, in_dtype
from hierfl.laplace.trials import prior_sites_at
from hierfl.program.program import Program
from hierfl.program.sites import LatentSite, Values
from hierfl.program.traces import Site, in_clients, per_client, scored
from hierfl.summaries.exact import Spread
from hierfl.summaries.mixing import Mixing, means_of, precision_of
from hierfl.summaries.reading import Reading


@tree_class
class Factors:
    """What the server keeps of the clients; of a Gaussian likelihood, at its starting scale."""

    precision: Tensor  # (N, V, V) Lambda; zeros of a client that has not answered yet
    shift: Tensor  # (N, V) eta
    fields: Values  # client fields that the prior of the local sites reads, (N, ...) each
    num_rows: Tensor | None = None  # (N,) of a Gaussian likelihood, how often the scale counts
    square: Tensor | None = None  # (N,) likewise, the sum of squares at l = 0
    sums: Values | None = None  # by which the server finds the factors itself, (N, ...) each
    noisy_square: Tensor | None = None  # (N,) `square` with row noise, which may be negative
    belief: Values | None = None  # of any client, (N, ...) each: as `belief_shapes` names them

    def of(self, ids: Tensor) -> "Factors":
        """Return the factors of some clients, of a likelihood that is not Gaussian."""
        fields = {name: value[ids] for name, value in self.fields.items()}
        return Factors(self.precision[ids], self.shift[ids], fields)

    def to_powers(self, powers: Tensor) -> "Factors":
        """Return the factors to the powers (N,), which widen them."""
        powers = powers.to(self.shift.dtype)[:, None]
        precision, shift = powers[..., None] * self.precision, powers * self.shift
        return replace(self, precision=precision, shift=shift)


class NoisyFactors(Protocol):
    """What is known from sums with noise."""

    def at(self, factors: Factors, scale: Tensor) -> tuple[Factors, Tensor]:
        """Return the factors at noise scale g (), and log constants (N,)."""


@dataclass(frozen=True, eq=False)
class Hierarchy:
    """The prior of a program whose local sites are Normal given the global ones."""

    reading: Reading
    fields: tuple[str, ...] = ()  # client fields that the prior of the local sites reads
    linear: tuple[str, ...] = ()  # names of the global sites in m
    # whether the mean of a local site, and of one in m, depends on another one of its kind
    chained: tuple[bool, bool] = (False, False)
    mean_slopes: Tensor | None = None  # (1, Km, Km), of m with m, if they are the same at any s
    steady: bool = False  # whether (mean of w, u) move with m as far at any s and t
    mixing: Mixing | None = None  # what the local sites are Normal given
    spread: Spread | None = None  # the noise scale of a Gaussian likelihood
    noise: NoisyFactors | None = None  # of its sums, with row noise

    def __post_init__(self) -> None:
        """Build cached tensors outside torch.func transforms."""
        _ = self.inside, self.outside, self.order, self.row, self.arrangement

    @property
    def program(self) -> Program:
        """Whose prior it is."""
        return self.reading.program

    @property
    def normal_size(self) -> int:
        """Dn, how many local parameters of a client are Normal (given its mixing parameters)."""
        return self.reading.own_size if self.mixing is None else len(self.mixing.normal)

    @property
    def mixing_size(self) -> int:
        """M, the number of mixing parameters of a client."""
        return 0 if self.mixing is None else self.mixing.size

    @cached_property
    def arrangement(self) -> Tensor:
        """Positions in v of the Normal local parameters, of the others, and of u, (V,) int64."""
        shared = torch.arange(self.reading.own_size, self.reading.size)
        if self.mixing is None:
            return torch.arange(self.reading.size)
        return torch.cat([self.mixing.normal, self.mixing.outside, shared])

    @cached_property
    def linear_sites(self) -> tuple[LatentSite, ...]:
        """The sites in m."""
        sites = self.program.latents.global_block.sites
        return tuple(site for site in sites if site.name in self.linear)

    def positions(self, names: Collection[str]) -> tuple[Tensor, Tensor]:
        """Return the positions in z of the global sites of some names, and of the others, int64."""
        sites = self.program.latents.global_block.sites
        is_named = torch.tensor([s.name in names for s in sites for _ in range(s.size)]) > 0
        return is_named.nonzero()[:, 0], (~is_named).nonzero()[:, 0]

    @cached_property
    def inside(self) -> Tensor:
        """Positions of m in z, (Km,) int64."""
        return self.positions(self.linear)[0]

    @cached_property
    def outside(self) -> Tensor:
        """Positions of s in z, (Ks,) int64."""
        return self.positions(self.linear)[1]

    @cached_property
    def order(self) -> Tensor:
        """Where each scalar of z lies in (m, s), (K,) int64."""
        return torch.argsort(torch.cat([self.inside, self.outside]))

    def whole(self, means: Tensor, scales: Tensor) -> Tensor:
        """Return z of m (Km,) and s (Ks,)."""
        return torch.cat([means, scales])[self.order]

    # ------------------------------------------------------------------------------------ the prior
    @cached_property
    def row(self) -> ClientBatch:
        """One row of one client: the prior reads none."""
        batch = self.program.prototype
        fields = {name: v[:, :1] for name, v in batch.fields.items()}
        return replace(batch, fields=fields, rows=None, counts=torch.ones_like(batch.counts))

    def batch(self, fields: Values, count: int = 1) -> ClientBatch:
        """Return what the prior reads of C clients: one for all if it is the same for all."""
        if self.fields:
            count = len(fields[self.fields[0]])
        if count == 1 and not self.fields:
            return self.row
        row = self.row

        def repeated(v: Tensor) -> Tensor:
            return v.expand(count, *v.shape[1:])

        return replace(
            row,
            fields={name: repeated(v) for name, v in row.fields.items()},
            client_fields={name: repeated(v) for name, v in row.client_fields.items()}
            | {name: fields[name][:, None] for name in self.fields},
            counts=repeated(row.counts),
            own_keys=repeated(row.own_keys),
        )

    def sites(self, z: Tensor, w: Tensor, batch: ClientBatch) -> dict[str, Site]:
        """Return the sites at z (K,) and local vectors w, (D,) or (C, D): `prior_sites_at`."""
        latents = self.program.latents
        values = latents.global_block.unflatten(z)[0]
        if w.shape[-1]:
            at = w.expand(batch.num_clients, w.shape[-1])[:, None]
            values |= latents.local_block.unflatten(at)[0]
        return prior_sites_at(self.program, values, in_dtype(batch, z.dtype))

    def log_global(self, z: Tensor, sites: dict[str, Site], *, without: tuple[str, ...]) -> Tensor:
        """Return log p(z) with the Jacobians of the transforms, (), without some sites."""
        jacobians = self.program.latents.global_block.unflatten(z)[1]
        total = torch.zeros((), dtype=z.dtype)
        for name, site in sites.items():
            if not in_clients(site) and name not in without:
                total = total + scored(site, site["fn"].log_prob(site["value"])).sum()
        return total + sum(j.sum() for name, j in jacobians.items() if name not in without)

    @property
    def normal_sites(self) -> tuple[LatentSite, ...]:
        """The local sites that are Normal, given the mixing parameters."""
        own = self.program.latents.local_block.sites
        return own if self.mixing is None else self.mixing.normal_sites

    def given(
        self, z: Tensor, batch: ClientBatch, t: Tensor | None, w: Tensor | None = None
    ) -> dict[str, Site]:
        """Return the program's sites at Normal local parameters w (Dn,), 0 by default, and t (C, M)."""
        w = torch.zeros(self.normal_size, dtype=z.dtype) if w is None else w
        whole = w if self.mixing is None or t is None else self.mixing.whole(w, t)
        return self.sites(z, whole, batch)

    def normals(self, sites: dict[str, Site], t: Tensor | None) -> dict[str, Site]:
        """Return sites, scattered ones with their Normal distributions given t (C, M)."""
        return sites if self.mixing is None or t is None else self.mixing.given(sites, t)

    def local(
        self,
        z: Tensor,
        batch: ClientBatch,
        t: Tensor | None = None,
        sites: dict[str, Site] | None = None,
    ) -> Normal:
        """Return p(w | z, t (C, M)) of the clients: (C, D), or (1, D); `found` are the sites `given` z."""
        own = self.normal_sites
        if not self.normal_size:
            none = torch.zeros(1, 0, 0, dtype=z.dtype)
            return Normal(none.sum(-1), none, none.sum((-2, -1)))

        def means(w: Tensor) -> Tensor:
            return means_of(own, self.normals(self.given(z, batch, t, w), t))

        sites = self.normals(sites or self.given(z, batch, t), t)
        normal = Normal(means_of(own, sites), *precision_of(own, sites))
        normal = normal.unchained(slopes_along(means, normal.mean)) if self.chained[0] else normal
        if self.reading.effects is None:
            return normal
        moved, scale = self.reading.effects.at(z)
        back = torch.linalg.inv_ex(scale).inverse
        return Normal(
            moved + normal.mean @ scale.mT,
            back.mT @ normal.precision @ back,
            normal.log_det - 2.0 * scale.slogdet()[1],
        )

    def log_mixing(self, sites: dict[str, Site], t: Tensor | None) -> Tensor:
        """Return log p(t | z) of clients by their sites, (C,); 0 without mixing parameters."""
        return torch.zeros(1) if self.mixing is None or t is None else self.mixing.log_p(sites, t)

    def local_vectors(self, w: Tensor, z: Tensor) -> Tensor:
        """Return w (..., D) itself, or e of a non-centered program, w = t(z) + T(z) e."""
        if self.reading.effects is None:
            return w
        moved, scale = self.reading.effects.at(z)
        return (w - moved) @ torch.linalg.inv_ex(scale).inverse.mT

    def log_local(self, sites: dict[str, Site], vectors: Tensor) -> Tensor:
        """Return the log prior density of the program's local sites at vectors (C, D), (C,)."""
        own = self.program.latents.local_block
        jacobians = own.unflatten(vectors[:, None])[1]
        densities = [
            scored(sites[s.name], sites[s.name]["fn"].log_prob(sites[s.name]["value"]))
            for s in own.sites
        ]
        return torch.stack([per_client(term) for term in (*densities, *jacobians.values())]).sum(0)

    def at_scale(self, factors: Factors, z: Tensor) -> tuple[Factors, Tensor, Tensor]:
        """Return the factors at z, a power of them, (), and their log constants, (N,) or (1,)."""
        constant, unit = factors.shift.new_zeros(1), factors.shift.new_ones(())
        if self.spread is None:
            return factors, unit, constant
        if self.noise is not None:
            here, constant = self.noise.at(factors, self.spread.at(z))
            return here, unit, constant
        power = self.spread.at(z) ** -2
        if factors.num_rows is not None and factors.square is not None:
            constant = 0.5 * (factors.num_rows * power.log() - power * factors.square)
        return factors, power, constant

    def means(self, scales: Tensor, values: dict[str, Site]) -> Normal:
        """Return p(m | s), (1, Km), by the sites at m = 0."""
        sites = self.linear_sites
        normal = Normal(means_of(sites, values), *precision_of(sites, values))
        if not self.chained[1]:
            return normal
        slopes = self.mean_slopes_at(scales) if self.mean_slopes is None else self.mean_slopes
        return normal.unchained(slopes.to(scales.dtype))

    def mean_slopes_at(self, scales: Tensor) -> Tensor:
        """Return how far the means of m move with m at s (Ks,), (1, Km, Km)."""
        zero = torch.zeros(self.reading.own_size, dtype=scales.dtype)

        def means(m: Tensor) -> Tensor:
            return means_of(self.linear_sites, self.sites(self.whole(m, scales), zero, self.row))

        return slopes_along(means, means(scales.new_zeros(len(self.inside))))

    def slopes_at(
        self,
        z: Tensor,
        batch: ClientBatch,
        t: Tensor | None = None,
        at_zero: Tensor | None = None,
    ) -> Tensor:
        """Return how far (mean of w, u) move with m: (C, V, Km), or (1, V, Km) for all clients.

        `at_zero` is the mean of w at m = 0, if it is there.
        """
        count = len(self.inside)
        if not count:
            return torch.zeros(1, self.reading.size, 0, dtype=z.dtype)
        axes = torch.eye(count, dtype=z.dtype)
        s = z[self.outside]
        if at_zero is None:
            at_zero = self.local(z.index_fill(0, self.inside, 0.0), batch, t).mean
        ahead = torch.vmap(lambda m: self.local(self.whole(m, s), batch, t).mean)(axes)
        moved = (ahead - at_zero).permute(1, 2, 0)  # (C, Dn, Km)
        others = torch.zeros(self.reading.own_size - self.normal_size, count, dtype=z.dtype)
        shared = (self.order[self.reading.shared][:, None] == torch.arange(count)).to(z.dtype)
        return torch.cat([moved, *(v.expand(len(moved), -1, -1) for v in (others, shared))], 1)


# ---------------------------------------------------------------------------------------- integrals
def rest_of(hierarchy: Hierarchy, z: Tensor, t: Tensor | None) -> Tensor:
    """Return what v holds beside Normal local parameters: u (U,), or (C, O + U)."""
    u = z[hierarchy.reading.shared]
    if hierarchy.mixing is None or t is None:
        return u
    o = hierarchy.mixing.sampled_part(t)
    return torch.cat([o, u.expand(len(o), -1)], 1)


def arranged(hierarchy: Hierarchy, precision: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors (C, V, V) and (C, V) with the Normal local parameters first."""
    if hierarchy.mixing is None:
        return precision, shift
    at = hierarchy.arrangement
    return precision[:, at][:, :, at], shift[:, at]


def given(
    hierarchy: Hierarchy,
    normal: Normal,
    z: Tensor,
    precision: Tensor,
    shift: Tensor,
    t: Tensor | None = None,
    power: Tensor | float = 1.0,
) -> Quadratic:
    """Return p(w | z, t) = `normal` times a power of each client's factor, as a function of w."""
    factor = arranged(hierarchy, precision, shift)
    return times_factor(normal, rest_of(hierarchy, z, t), *factor, power)


def of_means(
    hierarchy: Hierarchy,
    scales: Tensor,
    factors: Factors,
    t: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Quadratic:
    """Return the surrogate posterior of m (Km,), w integrated out; with log p(s) + log p(t | s)."""
    count = len(hierarchy.inside)
    batch = hierarchy.batch(factors.fields, 1 if t is None else len(t))
    z = hierarchy.whole(torch.zeros(count, dtype=scales.dtype), scales)
    sites = hierarchy.given(z, batch, t)
    own, others = hierarchy.local(z, batch, t, sites), rest_of(hierarchy, z, t)
    factors, power, constant_of_rows = hierarchy.at_scale(factors, z)
    precision, shift = arranged(hierarchy, factors.precision, factors.shift)
    summed = len(own.mean) == len(own.precision) == 1 and others.dim() == 1
    marginals = without_own(own, precision, shift, power, summed=summed)
    clients = max(len(own.mean), len(others) if others.dim() == 2 else 1)
    vectors = [v.expand(clients, v.shape[-1]) for v in (own.mean, others)]
    slopes = hierarchy.slopes_at(z, batch, t) if slopes is None else slopes
    whole = marginals.along(torch.cat(vectors, 1), slopes)  # m = 0 there
    log_p = hierarchy.log_global(z, sites, without=hierarchy.linear)
    log_p = log_p + hierarchy.log_mixing(sites, t).sum() + constant_of_rows.sum()
    if not count:
        return whole._replace(constant=whole.constant + log_p)
    prior = hierarchy.means(scales, sites)
    pull = (prior.precision @ prior.mean[..., None])[0, :, 0]
    constant = log_p + prior.log_prob(torch.zeros_like(pull))[0] + whole.constant
    return Quadratic(prior.precision[0] + whole.precision, pull + whole.shift, constant)
