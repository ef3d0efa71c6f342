"""A client's log marginal likelihood by Laplace's method, exact to second derivatives.

Let h(z, w) = log p(y, w | z) be the log joint of one client, with local sites w and global sites z,
both unconstrained. Let w^(z) be the mode of h in w, and A = -h_ww there. Then

    L(z) = h(z, w^) - log det(A) / 2 + D log(2 pi) / 2,

which equals log p(y | z) if h is quadratic in w. The mode moves with z by S = dw^/dz = A^-1 h_wz.
With g = -log det(A) / 2, J = (I; S), and v = A^-1 g_w held constant,

    L_z = h_z + g_z + S' g_w,        L_zz = J' [d^2 (h + g + v . h_w) / d(z, w)^2] J.

This differentiates the implicit function w^(z) twice, without differentiating the search for the
mode. All derivatives are reverse mode over reverse mode, because nested forward mode gives wrong
values through some of torch's losses (binary_cross_entropy_with_logits).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vjp

from hierfl.data.batch import ClientBatch
from hierfl.laplace.glm_rows import UNKNOWN, Linear, Parts, parts
from hierfl.laplace.mode import (
    CAP,
    LogDensity,
    client_density,
    is_settled,
    newton_step,
    prior_center,
)
from hierfl.program.handlers import log_joint, unchecked
from hierfl.program.program import Program, ProgramError
from hierfl.program.sites import Block

# The largest D: the Hessian in the local sites is inverted at every point.
LOCAL_LIMIT = 300
# A mode is found if a Newton step from it is shorter than this many of its own standard deviations.
MODE = 1e-4
# Where only the value of L is needed: chord steps, and the longest last Newton step, in sds.
CHORDS, NEAR = 4, 1e-2


class Inner(NamedTuple):
    """The local sites of one client at one point z."""

    mode: Tensor  # (D,), w^
    slope: Tensor  # (D, K), S = dw^/dz
    lost: Tensor  # (), whether no mode was found
    precision: Tensor  # (D, D), A at the mode


class Expansion(NamedTuple):
    """The log marginal likelihood L at one point z, with its derivatives."""

    value: Tensor  # (), L
    gradient: Tensor  # (K,), L_z
    hessian: Tensor  # (K, K), L_zz


@dataclass(frozen=True, eq=False)
class Marginal:
    """The log marginal likelihood of one client in z (K,); linear sites take one pass over the rows."""

    program: Program
    linear: Linear = UNKNOWN

    @cached_property
    def shared(self) -> Block:
        """The global sites."""
        return self.program.latents.global_block

    @cached_property
    def own(self) -> Block:
        """The local sites."""
        return self.program.latents.local_block

    def log_prior(self, z: Tensor) -> Tensor:
        """Return log p(z), with the log Jacobians of the transforms, ()."""
        values, jacobians = self.shared.unflatten(z)
        middle = {site.name: site.start for site in self.own.sites}
        _, prior = log_joint(self.program.model, {**values, **middle}, self.program.prototype, {})
        return prior + sum((j.sum() for j in jacobians.values()), torch.zeros(()))

    def prior(self, z: Tensor) -> Expansion:
        """Return log p(z) with its gradient and its Hessian."""
        return _expanded(self.log_prior, z)

    def density(self, z: Tensor, batch: ClientBatch) -> LogDensity:
        """Return h(z, .), computed from the whole program: (1, 1, D) -> (1,)."""
        values, _ = self.shared.unflatten(z)
        return client_density(self.program.model, self.own, values, batch)

    def at(self, z: Tensor, batch: ClientBatch) -> Parts:
        """Return h(z, .), split into its parts: (D,) -> ()."""
        return parts(self.program, self.linear, self.shared.unflatten(z)[0], batch)

    def start(self, z: Tensor, batch: ClientBatch) -> Tensor:
        """Return the center of the prior of w given z, (D,), where the search can start."""
        values, _ = self.shared.unflatten(z)
        return prior_center(self.program.model, self.program.latents, values, batch)[0, 0]

    def mode(
        self, z: Tensor, guess: Tensor, batch: ClientBatch, steps: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mode w^ (D,), its precision (D, D), and failure (), from the guess or the prior's center."""
        h = self.at(z, batch)
        peak = _climb(h, _better(h, guess, self.start(z, batch)), steps)
        peak = peak + newton_step(*h.curved(peak), cap=1.0)
        _, precision = h.curved(peak)
        # The gradient of the program itself, not of its parts, so that wrong parts are found out.
        slope = grad(lambda w: self.density(z, batch)(w[None, None])[0])(peak)
        # The length of a Newton step from here, in standard deviations.
        size = (newton_step(slope, precision, cap=1.0) * slope).sum().abs().sqrt()
        return peak, precision, ~(_is_positive_definite(precision) & (size < MODE))

    def value(
        self, z: Tensor, guess: Tensor, batch: ClientBatch, steps: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return L(z) () and whether no mode was found (); with one Newton step the guess must be near it."""
        if not self.own.size:
            return self.density(z, batch)(torch.zeros(1, 1, 0))[0], torch.zeros(())
        h = self.at(z, batch)
        w = _climb(h, _better(h, guess, self.start(z, batch)), steps)
        values, vectors = torch.linalg.eigh(h.curved(w)[1])
        root = vectors * values.abs().clamp(min=1e-12).rsqrt()
        for _ in range(CHORDS):
            step = root @ (root.T @ h.slope(w))
            w = w + step * (1.0 / (step.norm() + 1e-12)).clamp(max=1.0)
        slope, precision = h.curved(w)
        decrement = newton_step(slope, precision, cap=1.0) @ slope
        good = _is_positive_definite(precision) & (decrement.abs() < NEAR**2)
        return h.density(w) + 0.5 * decrement + _volume(precision), ~good

    def expand(
        self, z: Tensor, guess: Tensor, batch: ClientBatch, steps: int
    ) -> tuple[Expansion, Inner]:
        """Return L with its gradient and Hessian at z, and the local sites; guess as in `mode`."""
        if not self.own.size:
            return self._without_own_sites(z, batch)
        size = len(z)
        mode, precision, lost = self.mode(z, guess, batch, steps)
        at = torch.cat([z, mode])

        def pieces(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = self.at(u[:size], batch)
            slope, minus_hessian = h.curved(u[size:])
            return h.density(u[size:]), slope, _volume(minus_hessian)

        def rows(function: Callable[[Tensor], Tensor], along: Tensor) -> tuple[Tensor, Tensor]:
            """Return a function at (z, w^), and its derivatives along directions, one per row."""
            slope, pull = vjp(function, at)[:2]
            return slope, torch.vmap(lambda a: pull(a)[0])(along)

        unit, axes = (torch.eye(len(v), dtype=z.dtype) for v in (at, mode))
        _, slope_jacobian = rows(lambda u: self.at(u[:size], batch).slope(u[size:]), axes)
        covariance = torch.linalg.inv_ex(precision).inverse
        mode_slope = covariance @ slope_jacobian[:, :size]
        jacobian = torch.cat([unit[:size, :size], mode_slope])  # J = (I; S)
        volume_gradient = grad(lambda u: pieces(u)[2])(at)
        v = covariance @ volume_gradient[size:]

        def whole(u: Tensor) -> Tensor:
            value, slope, volume = pieces(u)
            return value + volume + v @ slope

        slope, second = rows(grad(whole), jacobian.T)
        hessian = second @ jacobian
        value = self.at(z, batch).density(mode) + _volume(precision)
        expansion = Expansion(value, slope @ jacobian, 0.5 * (hessian + hessian.T))
        return expansion, Inner(mode, mode_slope, lost, precision)

    def _without_own_sites(self, z: Tensor, batch: ClientBatch) -> tuple[Expansion, Inner]:
        """Return the expansion without local sites, where L is the log likelihood itself."""
        expansion = _expanded(lambda z: self.density(z, batch)(torch.zeros(1, 1, 0))[0], z)
        none = torch.zeros(0)
        return expansion, Inner(none, torch.zeros(0, len(z)), torch.zeros(()), torch.zeros(0, 0))


def _expanded(function: Callable[[Tensor], Tensor], z: Tensor) -> Expansion:
    slope, pull = vjp(grad(function), z)[:2]
    hessian = torch.vmap(lambda a: pull(a)[0])(torch.eye(len(z), dtype=z.dtype))
    return Expansion(function(z), slope, hessian)


def check_integrable(program: Program, limit: int, start: Iterable[str] = ()) -> None:
    """Refuse a program that Laplace's method cannot integrate, or that is too large for it."""
    for fault in _faults(program, limit, start):
        raise ProgramError(fault)
    if program.latents.local_block.size:
        _check_curved(program)


def _faults(program: Program, limit: int, start: Iterable[str]) -> Iterator[str]:
    shared, own = program.latents.global_block, program.latents.local_block
    names = [site.name for site in shared.sites]
    for name in start:
        if name not in names:
            yield (
                f"start names '{name}', which is not a global site: the global sites are "
                f"{', '.join(names)}"
            )
    for spec in program.params:
        if not spec.name.startswith("_shared."):
            yield (
                f"param '{spec.name}' would be learned, but here every unknown needs a prior: "
                "sample it outside the clients plate, or use fedsvi"
            )
    if not shared.size:
        yield (
            "the program has no global site, so there is nothing to infer in common: sample a site "
            "outside the clients plate"
        )
    for what, block, largest in (("global", shared, limit), ("local", own, LOCAL_LIMIT)):
        if block.size > largest:
            site = max(block.sites, key=lambda s: s.size)
            yield (
                f"the {what} sites have {block.size} parameters ({site.size} of them in "
                f"'{site.name}'), and the limit is {largest}, because second derivatives are taken "
                "in all of them: use fedsvi with guides.structured"
            )


def _check_curved(program: Program) -> None:
    """Refuse a log joint that does not curve down in every local site at its mode."""
    marginal, batch = Marginal(program), program.prototype
    with torch.no_grad(), unchecked():
        z = marginal.shared.start
        _, precision, lost = marginal.mode(z, marginal.start(z, batch), batch, 30)
    if not bool(lost) and bool(precision.isfinite().all()):
        return
    sites = marginal.own.sites
    pieces = precision.diagonal().split([s.size for s in sites])
    for site, piece in zip(sites, pieces, strict=True):
        if not bool((piece > 1e-9).all()):
            raise ProgramError(
                f"local site '{site.name}' cannot be integrated out: given the other sites, the "
                "log density of its client does not curve down at the mode (smallest curvature "
                f"{piece.min():.3g}), as with a Laplace prior or on a plateau: give it a Normal "
                "prior, or use fedsvi with guides.structured"
            )


def _better(h: Parts, guess: Tensor, center: Tensor) -> Tensor:
    good = h.density(guess).nan_to_num(nan=-torch.inf) > h.density(center)
    return torch.where(good, guess, center)


def _climb(h: Parts, w: Tensor, steps: int) -> Tensor:
    """Take Newton steps to the mode, each the best of the full, the half and the quarter step."""
    shares = torch.tensor([1.0, 0.5, 0.25], dtype=w.dtype)
    for _ in range(steps):
        step = newton_step(*h.curved(w), cap=CAP)
        tried = torch.vmap(lambda by, w=w, step=step: h.density(w + by * step))(shares)
        best = tried.nan_to_num(nan=-torch.inf).argmax(0, keepdim=True)
        w = w + shares.gather(0, best) * step
        if is_settled(step, w):
            break
    return w


def _is_positive_definite(precision: Tensor) -> Tensor:
    return torch.linalg.cholesky_ex(precision).info == 0


def _volume(precision: Tensor) -> Tensor:
    """Return -log det(A) / 2 + D log(2 pi) / 2, ()."""
    # Avoid slogdet and solve: wrong second derivatives under vmap without autograd around them.
    tril = torch.linalg.cholesky_ex(precision).L
    return 0.5 * precision.shape[-1] * math.log(2.0 * math.pi) - tril.diagonal().log().sum()
