r"""A client's log marginal likelihood in the global sites, by Laplace's method, with derivatives right to second order.

With h(z, w) = log p(y, w | z) of one client, w its own sites and z the global ones, both unconstrained, w^(z) the mode of h in w
and A = -h_ww there,

    L(z) = h(z, w^) - log det(A) / 2 + d log(2 pi) / 2,

which is log p(y | z) itself where h is quadratic in w. The mode moves with z by S = dw^/dz = A^-1 h_wz, so that with
g = -log det(A) / 2, J = (I; S) and v = A^-1 g_w held still,

    L_z = h_z + g_z + S' g_w,        L_zz = J' [d^2 (h + g + v . h_w) / d(z, w)^2] J:

the derivative of an implicit function twice over, no derivative of the search for the mode. All of it is reverse mode over
reverse mode: forward mode, nested, gives wrong numbers through some losses of torch (binary_cross_entropy_with_logits).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import pyro
import torch
from torch import Tensor
from torch.func import grad, vjp

from hierfl.data.batch import ClientBatch
from hierfl.laplace.glm_rows import UNKNOWN, Linear, Parts, parts
from hierfl.laplace.mode import CAP, LogDensity, client_density, newton_step, prior_centre
from hierfl.program.program import Program, ProgramError
from hierfl.program.sites import Block
from hierfl.program.terms import log_joint

LOCAL_LIMIT = (
    300  # on the numbers in a client's own sites: their Hessian is inverted at every point
)
MODE = 1e-4  # a mode is found if a Newton step from it is shorter than this many of its own standard deviations
CHORDS, NEAR = (
    4,
    1e-2,
)  # steps of the cheaper search where only the value counts, and how near it must come


class Inner(NamedTuple):
    """One client at one point z: mode (d,), slope dw^/dz (d, K), whether no mode was found (), precision A (d, d)."""

    mode: Tensor
    slope: Tensor
    lost: Tensor
    precision: Tensor


class Expansion(NamedTuple):
    """L and its derivatives at one point: value (), gradient (K,), Hessian (K, K)."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor


@dataclass(frozen=True, eq=False)
class Marginal:
    """The log marginal likelihood of one client of a program, a function of the flat unconstrained vector z (K,).

    Args:
        program: whose local sites are integrated out.
        linear: what `seen_linear` says of it, so that rows are gone through once, not once for every number of a client's own;
            without it the same numbers come more slowly.
    """

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
        """Log p(z), the transforms' Jacobians included, ()."""
        values, jacobians = self.shared.unflatten(z)
        middle = {site.name: site.start for site in self.own.sites}
        _, prior = log_joint(self.program.model, {**values, **middle}, self.program.prototype, {})
        return prior + sum((j.sum() for j in jacobians.values()), torch.zeros(()))

    def prior(self, z: Tensor) -> Expansion:
        """Log p(z), its gradient and its Hessian."""
        slope, pull = vjp(grad(self.log_prior), z)[:2]
        hessian = torch.vmap(lambda a: pull(a)[0])(torch.eye(len(z), dtype=z.dtype))
        return Expansion(self.log_prior(z), slope, hessian)

    def density(self, z: Tensor, batch: ClientBatch) -> LogDensity:
        """H(z, .), whatever it is made of: (1, 1, d) -> (1,)."""
        values, _ = self.shared.unflatten(z)
        return client_density(self.program.model, self.own, values, batch)

    def at(self, z: Tensor, batch: ClientBatch) -> Parts:
        """H(z, .) as its parts, (d,) -> ()."""
        return parts(self.program, self.linear, self.shared.unflatten(z)[0], batch)

    def start(self, z: Tensor, batch: ClientBatch) -> Tensor:
        """The middle of the prior of w given z, (d,): where a search for the mode begins when nothing better is known."""
        values, _ = self.shared.unflatten(z)
        return prior_centre(self.program.model, self.program.latents, values, batch)[0, 0]

    def mode(
        self, z: Tensor, guess: Tensor, batch: ClientBatch, steps: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(w^ (d,), A (d, d), lost ()) by `steps` safeguarded Newton steps from a guess (d,), or the prior's middle if better."""
        h = self.at(z, batch)
        found = _climb(h, _better(h, guess, self.start(z, batch)), steps)
        found = found + newton_step(*h.curved(found), cap=1.0)
        _, precision = h.curved(found)
        slope = grad(lambda w: self.density(z, batch)(w[None, None])[0])(
            found
        )  # not by the parts: they are checked by this
        size = (
            (newton_step(slope, precision, cap=1.0) * slope).sum().abs().sqrt()
        )  # in standard deviations
        return found, precision, ~(_curves(precision) & (size < MODE))

    def value(
        self, z: Tensor, guess: Tensor, batch: ClientBatch, steps: int = 1
    ) -> tuple[Tensor, Tensor]:
        """(L(z), lost), each (), at a fraction of the price of `expand`: an error of the mode counts by its square.

        `steps` of Newton and then chords, by the curvature that was found there; for one a guess is needed that is near.
        """
        if not self.own.size:
            return self.density(z, batch)(torch.zeros(1, 1, 0))[0], torch.zeros(())
        h = self.at(z, batch)
        found = _climb(h, _better(h, guess, self.start(z, batch)), steps)
        values, vectors = torch.linalg.eigh(h.curved(found)[1])
        root = vectors * values.abs().clamp(min=1e-12).rsqrt()
        for _ in range(CHORDS):
            step = root @ (root.T @ h.slope(found))
            found = found + step * (1.0 / (step.norm() + 1e-12)).clamp(max=1.0)
        slope, precision = h.curved(found)
        rest = newton_step(slope, precision, cap=1.0) @ slope
        return h.density(found) + 0.5 * rest + _volume(precision), ~(
            _curves(precision) & (rest.abs() < NEAR**2)
        )

    def expand(
        self, z: Tensor, guess: Tensor, batch: ClientBatch, steps: int
    ) -> tuple[Expansion, Inner]:
        """L, its gradient and its Hessian at z, and where the client's own sites are there."""
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
            """A gradient at (z, w^), and its derivatives along some directions, one a row."""
            slope, pull = vjp(function, at)[:2]
            return slope, torch.vmap(lambda a: pull(a)[0])(along)

        unit = torch.eye(len(at), dtype=z.dtype)
        _, of_slope = rows(
            lambda u: self.at(u[:size], batch).slope(u[size:]), torch.eye(len(mode), dtype=z.dtype)
        )
        covariance = torch.linalg.inv_ex(precision).inverse
        moves = covariance @ of_slope[:, :size]
        both = torch.cat([unit[:size, :size], moves])  # J
        of_volume = grad(lambda u: pieces(u)[2])(at)
        v = covariance @ of_volume[size:]

        def whole(u: Tensor) -> Tensor:
            value, slope, volume = pieces(u)
            return value + volume + v @ slope

        slope, second = rows(grad(whole), both.T)
        hessian = second @ both
        value = self.at(z, batch).density(mode) + _volume(precision)
        return Expansion(value, slope @ both, 0.5 * (hessian + hessian.T)), Inner(
            mode, moves, lost, precision
        )

    def _without_own_sites(self, z: Tensor, batch: ClientBatch) -> tuple[Expansion, Inner]:
        def value(z: Tensor) -> Tensor:
            return self.density(z, batch)(torch.zeros(1, 1, 0))[0]

        slope, pull = vjp(grad(value), z)[:2]
        hessian = torch.vmap(lambda a: pull(a)[0])(torch.eye(len(z), dtype=z.dtype))
        nothing = torch.zeros(0)
        return Expansion(value(z), slope, hessian), Inner(
            nothing, torch.zeros(0, len(z)), torch.zeros(()), torch.zeros(0, 0)
        )


def check_integrable(program: Program, limit: int, start: Iterable[str] = ()) -> None:
    """Refuse programs whose local sites Laplace's method cannot integrate out, or with too many global numbers.

    Args:
        program: read and checked.
        limit: on the numbers in the global sites.
        start: sites that are given a value to start from.

    Raises:
        ProgramError: naming the site, or the number, and what to use instead.
    """
    shared, own = program.latents.global_block, program.latents.local_block
    named = [site.name for site in shared.sites]
    learned = [spec.name for spec in program.params if not spec.name.startswith("_shared.")]
    foreign = [name for name in start if name not in named]
    if foreign:
        raise ProgramError(
            f"start names '{foreign[0]}', which is no global site; those are {', '.join(named)}"
        )
    if learned:
        raise ProgramError(
            f"param '{learned[0]}' is to be learned: here every unknown has a prior; sample it outside the clients plate, or take "
            f"fedsvi"
        )
    if not shared.size:
        raise ProgramError("no site is global: clients have nothing in common to be inferred")
    for what, sites, size, most in (
        ("global", shared.sites, shared.size, limit),
        ("local", own.sites, own.size, LOCAL_LIMIT),
    ):
        if size > most:
            site = max(sites, key=lambda s: s.size)
            raise ProgramError(
                f"the {what} sites have {size} numbers ({site.size} of them in '{site.name}'), and the limit is {most}: second "
                f"derivatives in all of them are too much; take fedsvi with guides.structured"
            )
    if own.size:
        _check_curved(program)


def _check_curved(program: Program) -> None:
    marginal, batch = Marginal(program), program.prototype
    with torch.no_grad(), pyro.validation_enabled(False):
        z = marginal.shared.start
        _, precision, lost = marginal.mode(z, marginal.start(z, batch), batch, 30)
    if not bool(lost) and bool(precision.isfinite().all()):
        return
    for site, piece in zip(
        marginal.own.sites,
        precision.diagonal().split([s.size for s in marginal.own.sites]),
        strict=True,
    ):
        if not bool((piece > 1e-9).all()):
            raise ProgramError(
                f"local site '{site.name}' cannot be integrated out: given the rest the log density of its client does not curve "
                f"down at a mode ({piece.min():.3g}), as a Laplace prior or a plateau does not; give it a Normal prior, or take "
                f"fedsvi with guides.structured"
            )


def _better(h: Parts, guess: Tensor, middle: Tensor) -> Tensor:
    good = h.density(guess).nan_to_num(nan=-torch.inf) > h.density(middle)
    return torch.where(good, guess, middle)


def _climb(h: Parts, w: Tensor, steps: int) -> Tensor:
    """Newton steps to the mode; one that lowers the density is halved twice before it is taken."""
    shares = torch.tensor([1.0, 0.5, 0.25], dtype=w.dtype)
    for _ in range(steps):
        step = newton_step(*h.curved(w), cap=CAP)
        tried = torch.vmap(lambda by, w=w, step=step: h.density(w + by * step))(shares)
        w = w + shares[tried.nan_to_num(nan=-torch.inf).argmax(0)] * step
    return w


def _curves(precision: Tensor) -> Tensor:
    return torch.linalg.cholesky_ex(precision).info == 0


def _volume(precision: Tensor) -> Tensor:
    """-log det(A) / 2 + d log(2 pi) / 2."""
    # not slogdet, nor solve: mapped over clients, without autograd around them, torch gives wrong second derivatives of these two
    tril = torch.linalg.cholesky_ex(precision).L
    return 0.5 * precision.shape[-1] * math.log(2.0 * math.pi) - tril.diagonal().log().sum()
