"""The hierarchy above the clients' factors, kept exact: its prior, and what integrates out in closed form.

The global numbers z are of two kinds. Given those in s ("scales": all that is not linear), the others m
("means") and the local sites w are jointly Normal:

    m | s ~ Normal,    w_k | z ~ Normal(a_k + M_k m, A^-1),    a, M, A functions of s

With the clients' factors exp(eta . v - v' Lambda v / 2) in v = (w, u), where u are entries of z, both integrate
out in closed form: w_k client by client, then m. What is left is a density of s alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.laplace.trials import sites_at
from hierfl.program.few_rows import in_dtype
from hierfl.program.program import Program
from hierfl.program.sites import LatentSite, Values
from hierfl.program.traces import Site, in_clients, scored
from hierfl.summaries.gaussians import LOG_2_PI, Normal, Quadratic, times_factor, without_own
from hierfl.summaries.normal_sites import means_of, precision_of
from hierfl.summaries.reading import Reading


class Factors(NamedTuple):
    """What the server keeps of the clients.

    precision: (N, V, V) Lambda; zeros of a client that has not answered yet.
    shift: (N, V) eta.
    fields: client fields that the prior of the local sites reads, (N, ...) each.
    """

    precision: Tensor
    shift: Tensor
    fields: Values

    def some(self, ids: Tensor) -> Factors:
        """Return those of some clients, at positions (n,)."""
        fields = {name: values[ids] for name, values in self.fields.items()}
        return Factors(self.precision[ids], self.shift[ids], fields)


@dataclass(frozen=True, eq=False)
class Hierarchy:
    """The prior of a program whose local sites are Normal given the global ones.

    Args:
        reading: what its likelihood reads.
        fields: names of the client fields that the prior of the local sites reads.
        linear: names of the global sites in m.
        chained: whether the mean of a local site, and of a site in m, depends on another one of its kind.
        diagonal: whether the local numbers are independent given z.
        slopes: (V, Km), how far (mean of w, u) move with m, where that is the same at any s and for all clients.
    """

    reading: Reading
    fields: tuple[str, ...] = ()
    linear: tuple[str, ...] = ()
    chained: tuple[bool, bool] = (False, False)
    diagonal: bool = False
    slopes: Tensor | None = None

    def __post_init__(self) -> None:
        """Make the tensors that are kept: one first made inside a transform of torch.func could not outlive it."""
        _ = self.inside, self.outside, self._order, self.row

    @property
    def program(self) -> Program:
        """Whose prior it is."""
        return self.reading.program

    @cached_property
    def linear_sites(self) -> tuple[LatentSite, ...]:
        """The sites in m."""
        return tuple(
            site for site in self.program.latents.global_block.sites if site.name in self.linear
        )

    @cached_property
    def inside(self) -> Tensor:
        """Positions of m in z, (Km,) int64."""
        names = [s.name for s in self.program.latents.global_block.sites for _ in range(s.size)]
        return torch.tensor([i for i, n in enumerate(names) if n in self.linear], dtype=torch.long)

    @cached_property
    def outside(self) -> Tensor:
        """Positions of s in z, (Ks,) int64."""
        mine = set(self.inside.tolist())
        size = self.program.latents.global_block.size
        return torch.tensor([i for i in range(size) if i not in mine], dtype=torch.long)

    @cached_property
    def _order(self) -> Tensor:
        return torch.argsort(torch.cat([self.inside, self.outside]))

    def whole(self, means: Tensor, scales: Tensor) -> Tensor:
        """Return z of m (Km,) and s (Ks,)."""
        return torch.cat([means, scales])[self._order]

    # ------------------------------------------------------------------------------------ the prior
    @cached_property
    def row(self) -> ClientBatch:
        """One row of one client: the prior reads none."""
        batch = self.program.prototype
        fields = {name: v[:, :1] for name, v in batch.fields.items()}
        return replace(batch, fields=fields, rows=None, counts=torch.ones_like(batch.counts))

    def batch(self, fields: Values) -> ClientBatch:
        """Return what the prior reads of C clients: their values of `self.fields`, (C, ...) each."""
        if not self.fields:
            return self.row
        count, row = len(fields[self.fields[0]]), self.row

        def repeated(v: Tensor) -> Tensor:
            return v.expand(count, *v.shape[1:])

        own = {name: repeated(v) for name, v in row.client_fields.items()}
        return replace(
            row,
            fields={name: repeated(v) for name, v in row.fields.items()},
            client_fields={**own, **{name: fields[name][:, None] for name in self.fields}},
            counts=repeated(row.counts),
            own_keys=repeated(row.own_keys),
        )

    def sites(self, z: Tensor, w: Tensor, batch: ClientBatch) -> dict[str, Site]:
        """Return the sites of the program at z (K,) and w (D,), the same for all clients, by name."""
        latents, count = self.program.latents, batch.num_clients
        values = latents.global_block.unflatten(z)[0]
        if len(w):
            at = w.expand(count, len(w))[:, None]
            values = {**values, **latents.local_block.unflatten(at)[0]}
        return sites_at(self.program, values, in_dtype(batch, z.dtype))

    def log_global(self, z: Tensor, sites: dict[str, Site], *, without: tuple[str, ...]) -> Tensor:
        """Return log p(z) with the Jacobians of the transforms, (), without some sites."""
        jacobians = self.program.latents.global_block.unflatten(z)[1]
        total = torch.zeros((), dtype=z.dtype)
        for name, site in sites.items():
            if not in_clients(site) and name not in without:
                total = total + scored(site, site["fn"].log_prob(site["value"])).sum()
        return total + sum(j.sum() for name, j in jacobians.items() if name not in without)

    def local(self, z: Tensor, batch: ClientBatch) -> Normal:
        """Return p(w | z) of the clients of a batch: (C, D), or (1, D) where it is the same for all."""
        own, size = self.program.latents.local_block.sites, self.reading.own_size
        if not size:
            none = torch.zeros(1, 0, 0, dtype=z.dtype)
            return Normal(none[0], none, torch.zeros(1, dtype=z.dtype))
        found = self.sites(z, torch.zeros(size, dtype=z.dtype), batch)
        normal = Normal(means_of(own, found), *precision_of(own, found))
        if self.chained[0]:
            axes = torch.eye(size, dtype=z.dtype)
            along = torch.vmap(lambda w: means_of(own, self.sites(z, w, batch)))(axes)
            normal = normal.unchained((along - normal.mean).permute(1, 2, 0))
        if self.reading.effects is None:
            return normal
        moved, scale = self.reading.effects.at(z)
        back = torch.linalg.inv_ex(scale).inverse
        return Normal(
            moved + normal.mean @ scale.mT,
            back.mT @ normal.precision @ back,
            normal.log_det - 2.0 * scale.slogdet()[1],
        )

    def local_vectors(self, w: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local numbers of the program at w (..., D), and the log of d w / d them, ().

        They are w itself, or e of a non-centred program, w = t(z) + T(z) e.
        """
        if self.reading.effects is None:
            return w, torch.zeros((), dtype=w.dtype)
        moved, scale = self.reading.effects.at(z)
        back = torch.linalg.inv_ex(scale).inverse
        return (w - moved) @ back.mT, scale.slogdet()[1]

    def means(self, scales: Tensor) -> Normal:
        """Return p(m | s), (1, Km)."""
        size = len(self.inside)
        zero = torch.zeros(self.reading.own_size, dtype=scales.dtype)

        def found(m: Tensor) -> dict[str, Site]:
            return self.sites(self.whole(m, scales), zero, self.row)

        at_zero = found(torch.zeros(size, dtype=scales.dtype))
        sites = self.linear_sites
        normal = Normal(means_of(sites, at_zero), *precision_of(sites, at_zero))
        if not self.chained[1]:
            return normal
        axes = torch.eye(size, dtype=scales.dtype)
        along = torch.vmap(lambda m: means_of(sites, found(m)))(axes)
        return normal.unchained((along - normal.mean).permute(1, 2, 0))

    # ------------------------------------------------------------------------------------ with the factors
    def given(self, normal: Normal, z: Tensor, precision: Tensor, shift: Tensor) -> Quadratic:
        """Return p(w | z) times each client's factor, as a function of w.

        Args:
            normal: p(w | z).
            z: (K,).
            precision: (C, V, V) Lambda of each client.
            shift: (C, V) eta.
        """
        return times_factor(normal, z[self.reading.shared], precision, shift)

    def of_means(self, scales: Tensor, factors: Factors) -> Quadratic:
        """Return the surrogate posterior as a function of m (Km,), with every w_k integrated out, at s (Ks,).

        Its constant has log p(s) in it.
        """
        count, batch = len(self.inside), self.batch(factors.fields)
        z = self.whole(torch.zeros(count, dtype=scales.dtype), scales)
        own = self.local(z, batch)
        each = without_own(
            own.precision,
            own.log_det,
            factors.precision,
            factors.shift,
            diagonal=self.diagonal,
            summed=len(own.mean) == len(own.precision) == 1,
        )
        u = z[self.reading.shared].expand(len(own.mean), -1)
        start = torch.cat([own.mean, u], 1)  # (mu, u) at m = 0
        whole = each.along(start, self.slopes_at(z, batch))
        zero = torch.zeros(self.reading.own_size, dtype=z.dtype)
        log_p = self.log_global(z, self.sites(z, zero, self.row), without=self.linear)
        if not count:
            return whole._replace(constant=whole.constant + log_p)
        prior = self.means(scales)
        pull = (prior.precision @ prior.mean[..., None])[0, :, 0]
        constant = 0.5 * (prior.log_det[0] - prior.mean[0] @ pull - count * LOG_2_PI)
        return Quadratic(
            prior.precision[0] + whole.precision,
            pull + whole.shift,
            log_p + constant + whole.constant,
        )

    def slopes_at(self, z: Tensor, batch: ClientBatch) -> Tensor:
        """Return how far (mu, u) move with m: (V, Km), or (C, V, Km) where it depends on the client."""
        if self.slopes is not None:
            return self.slopes.to(z.dtype)
        axes = torch.eye(len(self.inside), dtype=z.dtype)
        at_zero = z.index_fill(0, self.inside, 0.0)
        ahead = torch.vmap(lambda m: self.local(self.whole(m, z[self.outside]), batch).mean)(axes)
        moved = (ahead - self.local(at_zero, batch).mean).permute(1, 2, 0)  # (C, D, Km)
        shared = self._order[self.reading.shared][:, None] == torch.arange(len(self.inside))
        return torch.cat([moved, shared.to(z.dtype).expand(len(moved), -1, -1)], 1)
