"""The hierarchy above the clients' factors, kept exact: its prior, and what integrates out in closed form.

The global numbers z are of two kinds. Given those in s ("scales": all that is not linear), the others m
("means") and the local sites w are jointly Normal:

    m | s ~ Normal,    w_k | z ~ Normal(a_k + M_k m, A^-1),    a, M, A functions of s

With the clients' factors exp(eta . v - v' Lambda v / 2) in v = (w, u), where u are entries of z, both integrate
out in closed form: w_k client by client, then m. What is left is a density of s alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.laplace.trials import sites_at
from hierfl.program.few_rows import in_dtype
from hierfl.program.program import Program
from hierfl.program.sites import LatentSite, Values
from hierfl.program.traces import Site, in_clients, scored
from hierfl.summaries.normal_sites import means_of, precision_of
from hierfl.summaries.reading import Reading

LOG_2_PI = math.log(2.0 * math.pi)


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


class Normal(NamedTuple):
    """Normal distributions.

    mean: (C, D).
    precision: (C, D, D).
    log_det: (C,) log determinant of the precision.
    """

    mean: Tensor
    precision: Tensor
    log_det: Tensor

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log densities at x (D,), (C,)."""
        away = x - self.mean
        square = (away * (self.precision @ away[..., None])[..., 0]).sum(-1)
        return 0.5 * (self.log_det - square - len(x) * LOG_2_PI)


class Quadratic(NamedTuple):
    """exp(constant + shift . x - x' precision x / 2), a function of x (D,).

    precision: (..., D, D).
    shift: (..., D).
    constant: (...).
    """

    precision: Tensor
    shift: Tensor
    constant: Tensor

    def log_integral(self) -> tuple[Tensor, Tensor]:
        """Return the log of the integral over x, (...), and the covariance (..., D, D) of x; NaN where it diverges."""
        size = self.precision.shape[-1]
        if not size:
            return self.constant, self.precision
        covariance, log_det = inverse(self.precision)
        square = (self.shift * (covariance @ self.shift[..., None])[..., 0]).sum(-1)
        return self.constant + 0.5 * (square - log_det + size * LOG_2_PI), covariance


class _Inverse(torch.autograd.Function):
    """The inverse and the log determinant of positive definite matrices, and their derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor]:
        tril, info = torch.linalg.cholesky_ex(matrix)
        good = (info == 0) & matrix.isfinite().all((-2, -1))
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
        tril = torch.where(good[..., None, None], tril, eye)
        log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return torch.cholesky_inverse(tril), torch.where(good, log_det, torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (back,) = ctx.saved_tensors
        return grads[1][..., None, None] * back - back @ grads[0] @ back


def inverse(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse (..., D, D) and the log determinant (...), NaN where a matrix is not positive definite."""
    found: tuple[Tensor, Tensor] = _Inverse.apply(matrix)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, eq=False)
class Hierarchy:
    """The prior of a program whose local sites are Normal given the global ones.

    Args:
        reading: what its likelihood reads.
        fields: names of the client fields that the prior of the local sites reads.
        linear: names of the global sites in m.
        chained: whether the mean of a local site, and of a site in m, depends on another one of its kind.
    """

    reading: Reading
    fields: tuple[str, ...] = ()
    linear: tuple[str, ...] = ()
    chained: tuple[bool, bool] = (False, False)

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
            normal = _unchained(normal, (along - normal.mean).permute(1, 2, 0))
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
        return _unchained(normal, (along - normal.mean).permute(1, 2, 0))

    # ------------------------------------------------------------------------------------ with the factors
    def given(self, normal: Normal, z: Tensor, precision: Tensor, shift: Tensor) -> Quadratic:
        """Return p(w | z) times each client's factor, as a function of w.

        Args:
            normal: p(w | z).
            z: (K,).
            precision: (C, V, V) Lambda of each client.
            shift: (C, V) eta.
        """
        size, u = self.reading.own_size, z[self.reading.shared]
        pull = (normal.precision @ normal.mean[..., None])[..., 0]
        constant = 0.5 * (normal.log_det - (normal.mean * pull).sum(-1) - size * LOG_2_PI)
        return Quadratic(
            normal.precision + precision[:, :size, :size],
            pull + shift[:, :size] - precision[:, :size, size:] @ u,
            constant + shift[:, size:] @ u - 0.5 * (precision[:, size:, size:] @ u) @ u,
        )

    def of_means(self, scales: Tensor, factors: Factors) -> Quadratic:
        """Return the surrogate posterior as a function of m (Km,), with every w_k integrated out, at s (Ks,).

        Its constant has log p(s) in it.
        """
        size, count = self.reading.own_size, len(self.inside)
        batch, zero = self.batch(factors.fields), torch.zeros(count, dtype=scales.dtype)
        z = self.whole(zero, scales)
        at_zero = self.local(z, batch)
        axes = torch.eye(count, dtype=scales.dtype)
        total = self.log_global(
            z,
            self.sites(z, torch.zeros(size, dtype=z.dtype), self.row),
            without=self.linear,
        )
        own = self.given(at_zero, z, factors.precision, factors.shift)
        if not count:
            return Quadratic(axes, zero, total + own.log_integral()[0].sum())
        along = torch.vmap(lambda m: self.local(self.whole(m, scales), batch).mean)(axes)
        moved = (along - at_zero.mean).permute(1, 2, 0)  # (C, D, Km)
        pick = self._order[self.reading.shared][:, None] == torch.arange(count)
        pick = pick.to(scales.dtype)  # (U, Km): u = pick m + u at m = 0
        lam, eta, u = factors.precision, factors.shift, z[self.reading.shared]
        pulled = at_zero.precision @ moved
        cross = pulled - lam[:, :size, size:] @ pick  # (N, D, Km): the shift of w moves with m
        integral, covariance = own.log_integral()
        of_u = (eta[:, size:] - lam[:, size:, size:] @ u).sum(0) @ pick
        folded = cross.mT @ covariance
        back = moved.mT @ (at_zero.precision @ at_zero.mean[..., None])
        shift = of_u + (folded @ own.shift[..., None] - back)[..., 0].sum(0)
        of_uu = pick.mT @ lam[:, size:, size:].sum(0) @ pick
        whole = of_uu + (moved.mT @ pulled - folded @ cross).sum(0)
        prior = self.means(scales)
        pull = (prior.precision @ prior.mean[..., None])[0, :, 0]
        constant = 0.5 * (prior.log_det[0] - prior.mean[0] @ pull - count * LOG_2_PI)
        return Quadratic(
            prior.precision[0] + whole, pull + shift, total + constant + integral.sum()
        )


def _unchained(normal: Normal, slopes: Tensor) -> Normal:
    """Return the joint Normal of sites whose means move with one another by slopes (C, D, D)."""
    rest = torch.eye(slopes.shape[-1], dtype=slopes.dtype) - slopes
    mean = torch.linalg.inv_ex(rest).inverse @ normal.mean[..., None]
    return Normal(mean[..., 0], rest.mT @ normal.precision @ rest, normal.log_det)
